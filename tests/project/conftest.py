from kept_fork_servers import kept_fork_servers

__all__ = ["kept_fork_servers"]
