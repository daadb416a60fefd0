"""A CPU with AMX measured as one without: the operating system refuses the permission to use its tiles.

AMX's registers may be used by a process that asked for them (``arch_prctl(ARCH_REQ_XCOMP_PERM)``, Linux 5.16), and
libraries that use AMX ask, and take other instructions if they are refused. A seccomp filter refuses it here, to
this process and all that it starts, so that all contenders are alike. The filter's numbers are those of
``linux/filter.h``, ``linux/seccomp.h`` and ``asm/prctl.h``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
ARCH_X86_64, SYS_ARCH_PRCTL = 0xC000003E, 158
ARCH_REQ_XCOMP_PERM = 0x1023
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_amx() -> None:
    """Refuse AMX; raise ``OSError`` if the kernel takes no filter, ``RuntimeError`` on a CPU other than x86-64 or if
    this process has used the tiles already."""
    if platform.machine() != "x86_64":
        raise RuntimeError("only processors of x86-64 have AMX")
    instructions = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 0, 5, ARCH_X86_64),
        (LOAD, 0, 0, NUMBER),
        (JUMP_EQUAL, 0, 3, SYS_ARCH_PRCTL),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (JUMP_EQUAL, 0, 1, ARCH_REQ_XCOMP_PERM),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *one) for one in instructions)
    program = Program(len(instructions), code)
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))):
        if libc.prctl(*call, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if libc.syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, 18) == 0:
        raise RuntimeError("AMX can be used in spite of the filter")
