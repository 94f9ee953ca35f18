"""What users call: products with checks, dispatch and derivatives."""
