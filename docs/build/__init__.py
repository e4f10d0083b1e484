"""The builder of this documentation: it makes generated pages and tables, and lays out the site. ``make docs`` and ``make site`` run it."""
