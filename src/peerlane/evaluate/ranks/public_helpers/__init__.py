"""The package ``utils`` that candidates of the public benchmark import; see docs/candidates.md."""
