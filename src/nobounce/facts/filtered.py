"""System calls that this process may not make, whatever forbids them.

A kernel that lacks a call answers ENOSYS. A container's seccomp filter answers EPERM, or EACCES, to calls
that it does not know, or forbids as it does io_uring's (runc#2151, docker's default profile), and Linux
answers EPERM where kernel.io_uring_disabled is set. To a caller who has another way all of these mean the
same: take it. The other way itself tells what was a permission of the file.
"""

from __future__ import annotations

import errno
import os

REFUSED = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS})
UNSUPPORTED = REFUSED | {errno.EOPNOTSUPP, errno.EINVAL}
"""Also what a kernel or a file system says that has the call and not the flag."""


def sentence(call: str, error: OSError) -> str:
    """What to tell where there is no other way: the call, its error, and who may have refused it."""
    said = f"{call}: {os.strerror(error.errno)}" if error.errno else f"{call}: {error}"
    if error.errno not in REFUSED:
        return said
    return (
        f"{said} ({errno.errorcode[error.errno]}): this kernel lacks the system call, or a filter forbids "
        "it: "
        "allow it in the container's seccomp profile"
    )
