"""Between text and token ids: tokenizer, chat template, text as it streams."""
