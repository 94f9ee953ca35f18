"""What `docs.write` writes into the pages: numbers, tables, code, docstrings.

Each function makes text of the words of a comment: of committed rows
(`rows`, `results`, `numbers`), of the package's models (`numbers`,
`rung_tables`) and of code (`sources`, `api`). What is asked for and is not
there is a ValueError that says what is there.
"""
