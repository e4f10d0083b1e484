"""What others read: the page of results, and bundles of a run that others can verify."""
