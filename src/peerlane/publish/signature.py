"""Signatures of bundles. ``ssh-keygen -Y sign -n peerlane -f KEY NAME.zip`` writes ``NAME.zip.sig``; ssh-keygen checks it here too.

A signature says which key signed these bytes, the author's name among them. Whose key it is, the reader of a page knows or asks.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

from peerlane.common.files import open_regular, read_regular
from peerlane.errors import MissingDependency, UsageError
from peerlane.results.sanitize import one_line

NAMESPACE = "peerlane"
_MOST_BYTES = 64 << 10
_LIMIT_S = 60.0
_GOOD = re.compile(r'Good "peerlane" signature with (\S+) key (SHA256:[\w+/=]+)')


def signature_file(bundle: Path) -> Path:
    return bundle.with_name(f"{bundle.name}.sig")


def read_signer(bundle: Path) -> str | None:
    """Returns the kind and the fingerprint of the key that signed a bundle; None if it has no signature.

    Raises UsageError for a signature of something else, and MissingDependency without ssh-keygen.
    """
    file = signature_file(bundle)
    if not os.path.lexists(file):
        return None
    with tempfile.NamedTemporaryFile() as copy, open_regular(bundle) as contents:  # ssh-keygen would follow a link or wait for a pipe
        copy.write(read_regular(file, _MOST_BYTES))
        copy.flush()
        command = ["ssh-keygen", "-Y", "check-novalidate", "-n", NAMESPACE, "-s", copy.name]
        try:
            done = subprocess.run(command, stdin=contents, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False)
        except FileNotFoundError:
            raise MissingDependency(f"{file} needs ssh-keygen to be checked: install OpenSSH 8.2 or later, or remove the file") from None
        except subprocess.TimeoutExpired:
            raise UsageError(f"{file} was not checked within {_LIMIT_S:g} s: remove it, or ask its author for another") from None
    found = _GOOD.search(done.stdout)
    if done.returncode or found is None:
        said = one_line((done.stderr or done.stdout).strip())
        raise UsageError(f"{file} is no signature of {bundle} (ssh-keygen: {said}): ask its author for both, or remove it")
    return f"{found[1]} {found[2]}"
