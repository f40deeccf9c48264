"""The paper's figures and tables, each run → rows → picture."""
