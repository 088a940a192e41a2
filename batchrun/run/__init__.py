"""Run: the shell; everything that touches the world."""
