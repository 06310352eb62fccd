"""`infer tokenize`: the ids of a text, by a file or by what a daemon serves."""

import argparse
import json

from infer.text.tokenizer import Tokenizer
from shared.gguf_index import GgufIndex
from shared.runtime_dir import find_daemon


def tokenize(arguments: argparse.Namespace) -> int:
    path = arguments.model or find_daemon(arguments.name, None).model
    tokenizer = Tokenizer.from_metadata(GgufIndex.open(path, partial=True).metadata)
    print(json.dumps(tokenizer.encode(arguments.text, special=arguments.special)))
    return 0
