"""May this process use the GPU at all? Device nodes, groups, containers and WSL, with the
exact flag that is missing."""

from __future__ import annotations

from nobounce.checks.findings import Finding
from nobounce.checks.machine import Machine
from nobounce.facts.access import DEBUG, VISIBILITY, NodeAccess, cgroup_rules, groups, node_access, variables
from nobounce.facts.gpus import Gpu
from nobounce.facts.sysfs import there

KFD = "/dev/kfd"
NVIDIA_CONTROL = "/dev/nvidiactl"


def amd_access(machine: Machine, gpu: Gpu | None) -> list[Finding]:
    """The nodes that HIP opens: /dev/kfd and the GPU's render node."""
    found = _surroundings(machine)
    if machine.wsl:
        sentence = "this is WSL: the GPU is reached through /dev/dxg and storage is a virtual disk"
        found.append(Finding("device", "no", sentence, "/dev/dxg", "no-p2p"))
    nodes = [node_access(machine.source, KFD)]
    render = gpu.node.render_node if gpu is not None and gpu.node is not None else None
    if render is not None:
        nodes.append(node_access(machine.source, render))
    for node in nodes:
        if node.state != "ok":
            found.append(_closed(machine, node, "--device=/dev/kfd --device=/dev/dri"))
    if machine.kfd.hidden:
        sentence = f"{machine.kfd.hidden} node(s) of the topology are hidden from this process"
        found.append(
            Finding("access", "unknown", sentence, "/sys/class/kfd/kfd/topology/nodes", decides=False)
        )
    return found


def nvidia_access(machine: Machine) -> list[Finding]:
    """The nodes that CUDA opens."""
    found = _surroundings(machine)
    inside, path = machine.container
    if inside and not there(machine.source, "/run/udev"):
        sentence = (
            f"this {inside} container lacks /run/udev, which cuFile reads to learn of disks: "
            "start it with -v /run/udev:/run/udev:ro"
        )
        found.append(Finding("access", "unknown", sentence, path, decides=False))
    node = node_access(machine.source, NVIDIA_CONTROL)
    if node.state != "ok":
        found.append(_closed(machine, node, "--gpus all"))
    return found


def _closed(machine: Machine, node: NodeAccess, flags: str) -> Finding:
    inside, _ = machine.container
    rules = cgroup_rules(machine.source)
    if node.state == "absent":
        sentence = f"{node.path} is not there" + (
            f": start the container with {flags}" if inside else ": its driver is not loaded"
        )
    elif node.state == "hidden":
        path = "/sys/fs/cgroup/devices/devices.list" if rules is not None else node.path
        sentence = f"the device cgroup refuses {node.path}: start the container with {flags}"
        return Finding("access", "no", sentence, path, "no-device")
    elif node.state == "denied":
        mine = groups(machine.source)
        sentence = (
            f"this user may not open {node.path}, which belongs to group {node.group} (yours: "
            f"{', '.join(mine) or 'none'})"
        )
        if inside:
            sentence += f": start the container with --group-add {node.group}"
    else:
        sentence = f"{node.path} cannot be opened"
    return Finding("access", "no", sentence, node.path, "no-device")


def _surroundings(machine: Machine) -> list[Finding]:
    found = []
    hiding, debugging = variables(machine.source, VISIBILITY), variables(machine.source, DEBUG)
    for values, what in ((hiding, "choose what GPUs are seen"), (debugging, "slow or change transfers")):
        if values:
            listed = ", ".join(f"{k}={v}" for k, v in values.items())
            found.append(
                Finding(
                    "settings", "yes", f"variables that {what}: {listed}", "/proc/self/environ", decides=False
                )
            )
    xnack = machine.source.environment("HSA_XNACK")
    if xnack == "1":
        off = [
            n.gfx
            for n in machine.kfd.gpus
            if n.gfx and not n.gfx.startswith(("gfx90a", "gfx94", "gfx95", "gfx906", "gfx908"))
        ]
        if off:
            sentence = f"HSA_XNACK=1 is set, but {', '.join(sorted(set(off)))} cannot retry page faults"
            found.append(Finding("settings", "unknown", sentence, "/proc/self/environ", decides=False))
    return found
