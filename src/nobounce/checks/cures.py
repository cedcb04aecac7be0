"""The cheapest change that would help, in one sentence, with the command to type.

A cure never advises giving up encryption or redundancy: a file on dm-crypt or MD RAID is to be moved,
not its volume taken apart.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence

from nobounce import misnamed
from nobounce.checks.conditions import DeviceView
from nobounce.checks.files import Look
from nobounce.checks.findings import Cure, Finding, VerdictName
from nobounce.checks.machine import Machine
from nobounce.facts.block import BlockNode

Others = Callable[[], Sequence[str]]
"""Mount points where a file would go direct on the device asked for, nearest first."""

_SETTING, _ACCESS, _MODULE, _MOVE, _MOUNT, _BOOT, _INSTALL, _ELSEWHERE = range(8)
Priced = tuple[int, Cure]


def nowhere() -> Sequence[str]:
    """No other volume is known."""
    return ()


def root_command(*arguments: str) -> str:
    """The command that asks again as root. It names the interpreter, since sudo forgets a virtual
    environment; -P, because root is to run no module that lies in the current folder."""
    return shlex.join(["sudo", sys.executable, "-P", "-m", "nobounce", "check", *arguments])


def choose(
    machine: Machine,
    seen: Look,
    view: DeviceView,
    verdict: VerdictName,
    decided_by: tuple[Finding, ...],
    others: Others,
) -> Cure | None:
    """The cheapest cure of what decided the verdict; of several obstacles it says how many there are."""
    if verdict == "fastpath":
        return None
    if verdict == "unknown":
        return _find_out(machine, seen.path, view.name, decided_by)
    priced: dict[Cure, int] = {}
    for finding in decided_by:
        price, cure = _cure(machine, seen, view, finding, others)
        priced.setdefault(cure, price)
    if not priced:
        return None
    first = min(priced, key=lambda c: priced[c])
    if len(priced) == 1:
        return first
    more = len(priced) - 1
    count = "another obstacle remains" if more == 1 else f"{more} other obstacles remain"
    return Cure(f"{first.sentence} ({count} then, see above)", first.command)


def _find_out(machine: Machine, path: str, device: str, decided_by: tuple[Finding, ...]) -> Cure:
    if any(f.needs_root for f in decided_by) and machine.source.effective_uid() != 0:
        return Cure(
            "ask again as root, who can read what is not known here", root_command(path, "--device", device)
        )
    command = shlex.join(["nobounce", "check", path, "--device", device, "--probe"])
    return Cure("let a small real transfer settle it", command)


def _cure(machine: Machine, seen: Look, view: DeviceView, finding: Finding, others: Others) -> Priced:
    by_code = _BY_CODE.get(finding.code)
    if by_code is not None:
        return by_code
    if finding.code == "no-file" and (meant := _meant(machine, seen.path)):
        return _ELSEWHERE, Cure(meant)
    if finding.code in ("no-file", "no-model"):
        return _ELSEWHERE, Cure("check the name", shlex.join(["ls", "-ld", "--", seen.path]))
    if finding.code == "no-device":
        return _ACCESS, _device(machine, view, finding)
    if finding.code == "no-p2p":
        return _peer(machine, seen, view, finding, others)
    if finding.code == "ext4-journal":
        return _journal(machine, seen, others)
    if finding.code == "missing-module" and finding.layer == "driver":
        return _driver(finding)
    return _move(machine, seen, others)


def _meant(machine: Machine, path: str) -> str:
    try:
        target = machine.source.readlink(path)
    except OSError:
        target = None
    return misnamed.cure(path, target)


_BY_CODE: dict[str, Priced] = {
    "fastpath-disabled": (_SETTING, Cure("let transfers go direct again", "unset HIPFILE_FORCE_COMPAT_MODE")),
    "fallback-disabled": (_SETTING, Cure("allow fallback again", "unset HIPFILE_ALLOW_COMPAT_MODE")),
    "no-nvidia-fs": (_MODULE, Cure("load NVIDIA's storage module", "sudo modprobe nvidia-fs")),
    "no-cufile-library": (_INSTALL, Cure("install NVIDIA's cuFile", "pip install nvidia-cufile")),
    "no-amd-file-calls": (
        _INSTALL,
        Cure(
            "install a HIP runtime with direct I/O (ROCm 7.2 or later)", "sudo amdgpu-install --usecase=hip"
        ),
    ),
    "virtual-function": (
        _ELSEWHERE,
        Cure(
            "run on the host, or in a guest that has the whole GPU passed through: virtual functions have "
            "no direct I/O"
        ),
    ),
    "iommu-translated": (
        _BOOT,
        Cure("boot with iommu=pt", "sudo grubby --update-kernel=ALL --args=iommu=pt && sudo reboot"),
    ),
    "file-kind": (_ELSEWHERE, Cure("name a regular file, a folder that holds some, or a block device")),
}


def _move(machine: Machine, seen: Look, others: Others) -> Priced:
    here = "" if seen.facts is None else seen.facts.filesystem.mount_point
    there = [m for m in others() if m != here]
    if there:
        target = _folder_on(machine, there[0])
        return _MOVE, Cure(
            f"copy the file to {target or 'a folder on /'}{_if_it_may(seen)}",
            shlex.join(["cp", "--", seen.path, target.rstrip("/") + "/"]) if target else "",
        )
    if seen.facts is not None and seen.facts.kind == "block":
        return _ELSEWHERE, Cure(
            "read from a disk that supports O_DIRECT: a local NVMe disk, directly or through LVM"
        )
    return _ELSEWHERE, Cure(
        "move the file to an xfs or ext4 file system on a local NVMe disk (directly or through LVM): none "
        "is mounted here",
        "lsblk --output NAME,TYPE,TRAN,FSTYPE,MOUNTPOINT",
    )


def _folder_on(machine: Machine, mount_point: str) -> str:
    """Where a file may be put on a volume: on that of / never into / itself; "" where
    no folder there is known."""
    if mount_point != "/":
        return mount_point
    others = {m.mount_point for m in machine.mounts}
    return "" if others & {"/var", "/var/tmp"} else "/var/tmp"


def _if_it_may(seen: Look) -> str:
    """What the copy would lack: encryption and redundancy are the reader's to judge, not ours to give up."""
    kinds = {kind for stack in seen.stacks for kind in _kinds(stack)}
    lacks = [said for kind, said in (("crypt", "unencrypted"), ("md", "without MD RAID")) if kind in kinds]
    return f", if it may lie {' and '.join(lacks)} there" if lacks else ""


def _kinds(node: BlockNode) -> list[str]:
    return [node.kind, *(kind for below in node.below for kind in _kinds(below))]


def _journal(machine: Machine, seen: Look, others: Others) -> Priced:
    price, cure = _move(machine, seen, others)
    if price == _MOVE or seen.facts is None:
        return price, cure
    system = seen.facts.filesystem
    if system.journal == "none":
        command = (
            f"sudo umount {_q(system.mount_point)} && sudo tune2fs -O has_journal {_q(system.source)} && "
            f"sudo mount {_q(system.source)} {_q(system.mount_point)}"
        )
        return _MOUNT, Cure(f"give the ext4 at {system.mount_point} a journal", command)
    command = (
        f"sudo umount {_q(system.mount_point)} && sudo mount -o data=ordered {_q(system.source)} "
        f"{_q(system.mount_point)}"
    )
    return _MOUNT, Cure(f"mount {system.mount_point} with data=ordered", command)


def _q(word: str) -> str:
    return shlex.quote(word)


def _device(machine: Machine, view: DeviceView, finding: Finding) -> Cure:
    inside, _ = machine.container
    amd = view.name.startswith("hip")
    flags = "--device=/dev/kfd --device=/dev/dri --group-add render" if amd else "--gpus all"
    if inside:
        return Cure("start the container with the GPU's devices", f"docker run {flags} ...")
    if finding.layer == "access" and "group" in finding.sentence:
        group = finding.sentence.partition("belongs to group ")[2].partition(" ")[0] or "render"
        return Cure(
            "join the group that may open it, and log in again",
            f"sudo usermod --append --groups {group} $USER",
        )
    if finding.layer == "device" and (machine.gpus or view.name.startswith("sim")):
        return Cure("choose a device that is there", "nobounce check")
    return Cure("load the GPU's driver", f"sudo modprobe {'amdgpu' if amd else 'nvidia'}")


def _peer(machine: Machine, seen: Look, view: DeviceView, finding: Finding, others: Others) -> Priced:
    if machine.wsl:
        return _ELSEWHERE, Cure("run on Linux itself: WSL has no direct path to storage")
    if finding.layer == "kernel":
        return _INSTALL, Cure(
            "boot a kernel built with CONFIG_PCI_P2PDMA=y (on Ubuntu 22.04 the HWE kernel is)",
            "sudo apt install linux-generic-hwe-22.04",
        )
    if "large BAR" in finding.sentence:
        return _BOOT, Cure(
            "switch on Above 4G Decoding and Resizable BAR in the firmware's settings",
            "sudo systemctl reboot --firmware-setup",
        )
    if finding.layer == "driver":
        return _INSTALL, Cure(
            "see why the driver has direct I/O down on this GPU", "sudo dmesg | grep -i -e amdgpu -e kfd"
        )
    price, cure = _move(machine, seen, others)
    return price, cure


def _driver(finding: Finding) -> Priced:
    if finding.read_from.startswith("/sys/module"):
        return _MODULE, Cure("load AMD's driver", "sudo modprobe amdgpu")
    return _INSTALL, Cure(
        "install a driver with direct I/O (amdgpu-dkms of ROCm 7.2 or later)",
        "sudo amdgpu-install --usecase=dkms",
    )
