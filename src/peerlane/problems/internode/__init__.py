"""Problems whose ranks are on several nodes. They are not part of the suite of one node, and ``all`` does not name them."""
