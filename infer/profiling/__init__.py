"""Where a token's time goes."""
