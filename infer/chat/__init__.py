"""The REPL, its conversations and its progress line."""
