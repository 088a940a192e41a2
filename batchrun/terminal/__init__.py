"""Terminal: what people see on stderr, and where data goes."""
