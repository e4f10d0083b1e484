import pytest


@pytest.fixture(autouse=True)
def kept_fork_servers() -> None:
    """Tests of how these processes start and end have their own."""
