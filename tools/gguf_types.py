"""Which tensor gets which type: rules on the command line or in a TOML file.

    --type 'blk.{40..79}.ffn_*_exps=Q4_K'          [types]
                                                   "*_exps" = "IQ2_XXS"

A pattern is a tensor's name with or without `.weight`; `*` stands for anything, `{3..5,8}` for
these numbers. The last rule that fits counts; the command line comes after the file.
"""

import argparse
import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gguf_importance import Importance
from gguf_quantize import needs_importance, type_name, type_of

from shared.errors import ConfigError, UnsupportedModel, cause_of
from shared.quants import GEOMETRY, TensorType

MAX_RANGE = 1 << 12
# Rows that a type's blocks do not divide get the first of these that fits.
_NARROW = (TensorType.Q8_0, TensorType.F16)
# Vectors, and the router: a small error there chooses another expert. Read as F32 everywhere.
_ALWAYS_F32 = re.compile(r"norm|exp_probs_b|ffn_gate_inp\.|\.bias$")
_EXPERTS = re.compile(r"blk\.([0-9]+)\.ffn_(gate|up|down)_exps\.weight")


@dataclass(frozen=True)
class Choice:
    """`note` says why the type is not the one that was asked for."""

    type_id: int
    note: str = ""


class TypeRules:
    """`keep` as a type leaves a tensor as it is in its source."""

    KEEP = -1

    def __init__(self, rules: Iterable[tuple[str, str]]) -> None:
        """(pattern, type name) pairs; ConfigError or UnsupportedModel for what cannot be read."""
        self._rules = [
            (compile_pattern(pattern), self.KEEP if name.lower() == "keep" else type_of(name))
            for pattern, name in rules
        ]

    def wanted(self, name: str) -> int:
        """The type id that the rules say, or KEEP where none does."""
        for pattern, type_id in reversed(self._rules):
            if pattern.fullmatch(name):
                return type_id
        return self.KEEP


@dataclass(frozen=True)
class TypeChooser:
    """Rules, and what to do where they cannot be followed.

    fallback: for a type that demands an importance matrix where there is none; None refuses.
    mtp_experts: of blocks from `n_layers` on, which no text ever activates; None: as the rules say.
    quantising: False where nothing is made, so that no type demands anything.
    """

    rules: TypeRules
    importance: Importance | None
    fallback: int | None
    mtp_experts: int | None
    n_layers: int
    quantising: bool = True

    def choose(self, name: str, shape: tuple[int, ...], source_type: int) -> Choice:
        """The type of one tensor that is now of `source_type`.

        UnsupportedModel where the type demands an importance matrix that is not there.
        """
        wanted = self.rules.wanted(name)
        if wanted == TypeRules.KEEP:
            return Choice(source_type)
        if len(shape) == 1 or _ALWAYS_F32.search(name):
            return Choice(int(TensorType.F32))
        note = ""
        if self.is_mtp_expert(name) and self.mtp_experts is not None:
            wanted, note = self.mtp_experts, "MTP expert"
        block_weights = GEOMETRY[wanted].block_weights
        if shape[0] % block_weights:
            asked = type_name(wanted)
            wanted = next(int(t) for t in _NARROW if shape[0] % GEOMETRY[t].block_weights == 0)
            note = f"rows of {shape[0]} are no whole blocks of {asked}"
        if wanted != source_type and not self._can_make(wanted, name):
            if self.fallback is None:
                raise self._refusal(type_name(wanted), name)
            note = f"no importance matrix for {type_name(wanted)}"
            wanted = self.fallback
        return Choice(wanted, note)

    def _refusal(self, wanted: str, name: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{wanted} for {name} demands an importance matrix, and there is none for this tensor",
            "give --mtp-experts TYPE: no text reaches the experts of MTP blocks"
            if self.is_mtp_expert(name)
            else "give --imatrix FILE that knows it (tools/gguf_imatrix.py), another --type,"
            " or --fallback TYPE for what it does not know",
        )

    def is_mtp_expert(self, name: str) -> bool:
        found = _EXPERTS.fullmatch(name)
        return found is not None and int(found[1]) >= self.n_layers

    def _can_make(self, type_id: int, name: str) -> bool:
        known = self.importance is not None and name in self.importance
        return known or not self.quantising or not needs_importance(type_id)


def add_type_options(
    parser: argparse.ArgumentParser, defaults: str, *, quantising: bool = True
) -> None:
    """`quantising`: whether importance matrices matter, or the types are only talked of."""
    group = parser.add_argument_group("types", description=f"Without a rule: {defaults}.")
    group.add_argument(
        "--type",
        action="append",
        default=[],
        metavar="PATTERN=TYPE",
        help="e.g. 'blk.{40..79}.ffn_*_exps=Q4_K'; may be repeated, the last one that fits counts",
    )
    group.add_argument("--types", type=Path, metavar="FILE.toml", help="[types] of such rules")
    group.add_argument(
        "--mtp-experts",
        metavar="TYPE",
        help="type of the MTP blocks' experts, which an importance matrix never knows",
    )
    if not quantising:
        return
    group.add_argument(
        "--imatrix", type=Path, metavar="FILE", help="importance matrix (llama.cpp's GGUF format)"
    )
    group.add_argument(
        "--fallback",
        metavar="TYPE",
        help="where a type demands an importance matrix that is not there (default: refuse)",
    )


def chooser(
    arguments: argparse.Namespace,
    defaults: Iterable[tuple[str, str]],
    n_layers: int,
    default_mtp: str | None = None,
) -> TypeChooser:
    """What the options of `add_type_options` say; `defaults` are the rules before all others."""
    rules = [*defaults, *_from_toml(arguments.types), *map(parse_rule, arguments.type)]
    mtp = arguments.mtp_experts or default_mtp
    quantising = hasattr(arguments, "imatrix")
    imatrix, fallback = (getattr(arguments, name, None) for name in ("imatrix", "fallback"))
    found = TypeChooser(
        TypeRules(rules),
        Importance.open(imatrix) if imatrix else None,
        type_of(fallback) if fallback else None,
        type_of(mtp) if mtp else None,
        n_layers,
        quantising,
    )
    for type_id in (found.fallback, found.mtp_experts):
        if type_id is not None and needs_importance(type_id):
            raise ConfigError(
                f"{type_name(type_id)} demands an importance matrix itself", "take another type"
            )
    return found


def parse_rule(text: str) -> tuple[str, str]:
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern or not name:
        raise ConfigError(f"--type {text} is no rule", "write PATTERN=TYPE")
    return pattern, name


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern as this module's text describes; ConfigError for one that is not well-formed."""
    words = []
    for word in re.split(r"(\*|\{[^{}]*\})", pattern):
        if word == "*":
            words.append(".*")
        elif word.startswith("{"):
            words.append(f"(?:{'|'.join(map(str, _numbers(word, pattern)))})")
        else:
            words.append(re.escape(word))
    return re.compile("".join(words) + r"(?:\.weight)?")


def _numbers(braces: str, pattern: str) -> list[int]:
    """The numbers of `{3..5,8}`."""
    found: list[int] = []
    for item in braces[1:-1].split(","):
        ends = re.fullmatch(r"([0-9]{1,6})(?:\.\.([0-9]{1,6}))?", item)
        if ends is None:
            raise ConfigError(f"{braces} in {pattern} is no list of numbers", "write {3..5,8}")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last < first + MAX_RANGE:
            raise ConfigError(f"{item} in {pattern} is no range", "write the smaller number first")
        found += range(first, last + 1)
    return found


def _from_toml(path: Path | None) -> list[tuple[str, str]]:
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {cause_of(error)}", 'write [types], then "*" = "Q8_0"'
        ) from error
    types = table.get("types")
    if list(table) != ["types"] or not isinstance(types, dict):
        raise ConfigError(f"{path} has other tables than [types]", "put all rules under [types]")
    if not all(isinstance(name, str) for name in types.values()):
        raise ConfigError(f"{path}: a type is not a text", 'write "PATTERN" = "TYPE"')
    return list(types.items())


def matrix_count(shape: tuple[int, ...]) -> int:
    """Experts or heads of a tensor; 1 for a plain matrix or vector."""
    return math.prod(shape[2:])
