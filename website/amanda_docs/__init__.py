"""The documentation site: docs/, the notebooks and the docstrings made into build/site."""
