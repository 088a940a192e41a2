"""Plan: decisions and nothing but decisions; pure, synchronous, deterministic."""
