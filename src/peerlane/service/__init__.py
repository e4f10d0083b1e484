"""Judging for others: a service over HTTP, its client, dispatchers to many nodes, and adapters for trainers.

On the side of the service read app.py first, then node.py (who judges) and queue.py (what is kept). client.py is the other side.
"""
