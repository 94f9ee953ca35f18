"""What the programs share: timing, provenance, rows, shapes, tables, plots."""
