# expect: import_error
"""Cannot be imported."""

raise RuntimeError("this candidate needs a library that is not there")
