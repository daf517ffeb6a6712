"""Switching the shim on in programs that know nothing of it: one bootstrap, and a thin module per library touched."""
