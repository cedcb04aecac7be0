"""A machine's answers in one file: for a bug report, with everything that names the machine taken out.

A .tar with `capture.json` (the answers) and `request.json` (what was asked). Host names, addresses (MAC,
IP), serial numbers and UUIDs become tokens, the same one wherever the same text stood, so that what
belongs together still does.
"""

from __future__ import annotations

import io
import ipaddress
import json
import re
import tarfile
from typing import Any

from nobounce import outfile
from nobounce.config import Settings
from nobounce.errors import json_kind
from nobounce.facts import regular
from nobounce.facts.acs import extended_capabilities
from nobounce.facts.source import CapturedSource, RecordingSource

SCHEMA = "nobounce.check-request/1"
MOST_NBYTES = 1 << 28

_UUID = re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
_MAC = re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}(?:[0-9a-fA-F]{2}:?)*[0-9a-fA-F]{2}\b")
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:.])")
_BDF_LIKE = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}(\.[0-7])?)?")
_LVM = re.compile(r"\b(LVM-)[0-9A-Za-z]{64}\b")
_NQN = re.compile(r"\bnqn\.[^\s,\"]+")
_REMOTE = re.compile(r"(?<![\w/])([A-Za-z0-9][\w.-]*\.[A-Za-z][\w-]*|[A-Za-z][\w-]*)(:/)")
_HEXID = re.compile(r"\b(GPU-|MIG-)[0-9a-fA-F-]{8,}\b")
_SERIAL_FILES = re.compile(
    r"/(serial|wwid|nguid|eui|uuid|unique_id|serial_number|hostid|hostnqn|subsysnqn|address)$"
)
_PCI_CONFIG = re.compile(r"/sys/bus/pci/devices/[^/]+/config")
_SERIAL_NUMBER = 0x0003
"""The extended capability of PCIe that holds a device's serial number, in the 8 bytes behind its header."""
_SYSTEM = ("/sys/", "/proc/")
_NAMING = ("/cmdline", "/mountinfo", "/cgroup", "/backing_file", "/dm/name")
"""Files of the system in which people's names for things stand; in the others a host
name is a coincidence."""
_COMMON = frozenset(
    {"box", "class", "data", "debian", "dev", "fedora", "host", "linux", "localhost", "mapper", "node", "pci"}
    | {"proc", "server", "sys", "ubuntu", "vm"}
)
"""Host names that identify no machine, and that stand in too many other places."""
_UNIQUE_ID = re.compile(r"(?m)^(unique_id )(\d+)")


class Scrubber:
    """Replaces what names a machine, consistently."""

    def __init__(self, host_names: list[str]) -> None:
        words = {w for name in host_names for w in (name, name.partition(".")[0]) if len(w) > 1}
        known = sorted(words - _COMMON, key=len, reverse=True)
        self._hosts = [re.compile(rf"(?<![A-Za-z0-9]){re.escape(w)}(?![A-Za-z0-9=])") for w in known]
        self._tokens: dict[tuple[str, str], str] = {}

    def _token(self, kind: str, found: str) -> str:
        key = (kind, found.lower())
        if key not in self._tokens:
            number = sum(1 for k, _ in self._tokens if k == kind)
            made = {
                "uuid": f"00000000-0000-0000-0000-{number:012x}",
                "mac": f"02:00:00:00:{number >> 8 & 255:02x}:{number & 255:02x}",
                "ipv4": f"192.0.2.{number % 256}",
                "ipv6": f"2001:db8::{number:x}",
                "number": str(1000 + number),
                "gpu": f"{number:08x}",
                "lvm": f"{number:064d}",
            }
            self._tokens[key] = made.get(kind, f"{kind}{number}")
        return self._tokens[key]

    def text(self, found: str, *, hosts: bool = True) -> str:
        """The text with every name replaced; without `hosts`, host names stay: a host may
        be called as a device is."""
        found = _NQN.sub(lambda m: f"nqn.{self._token('subsystem', m[0])}", found)
        found = _LVM.sub(lambda m: m[1] + self._token("lvm", m[0]), found)
        found = _HEXID.sub(lambda m: m[1] + self._token("gpu", m[0]), found)
        found = _UUID.sub(lambda m: self._token("uuid", m[0]), found)
        found = _UNIQUE_ID.sub(lambda m: m[1] + self._token("number", m[2]), found)
        found = _MAC.sub(lambda m: self._token("mac", m[0]), found)
        found = _IPV4.sub(lambda m: self._token("ipv4", m[0]), found)
        found = _IPV6.sub(self._ipv6, found)
        found = _REMOTE.sub(lambda m: self._token("host", m[1]) + m[2], found)
        for host in self._hosts if hosts else ():
            found = host.sub("host", found)
        return found

    def _ipv6(self, match: re.Match[str]) -> str:
        try:
            address = int(ipaddress.IPv6Address(match[0]))
        except ValueError:
            return match[0]
        if address < 1 << 16:  # "0::/" in a cgroup, and the loopback address
            return match[0]
        return self._token("ipv6", match[0])

    def answer(self, key: str, answer: dict[str, Any]) -> dict[str, Any]:
        """One answer of a capture."""
        if "value" not in answer:
            return answer
        question, *rest = json.loads(key)
        value = answer["value"]
        path = str(rest[0]) if rest else ""
        if question == "uname" and isinstance(value, list):
            value = [value[0], "host", *value[2:]]
        elif question == "read" and _SERIAL_FILES.search(path) and not path.endswith("/dm/uuid"):
            value = self._identity(path, str(value))
        elif question == "read" and _PCI_CONFIG.fullmatch(path):
            return {"value": without_serial(str(value))}
        tells = not path.startswith(_SYSTEM) or path.endswith(_NAMING)
        return {"value": self.value(value, hosts=tells)}

    def _identity(self, path: str, value: str) -> str:
        """A serial number, or an NVMe controller's address, which is a PCI address for a local one."""
        found = value.strip()
        if path.endswith("/address") and _BDF_LIKE.fullmatch(found):
            return value
        return self._token("serial", found) + "\n"

    def value(self, found: Any, *, hosts: bool = True) -> Any:
        """Any JSON value, keys of objects too."""
        if isinstance(found, str):
            return self.text(found, hosts=hosts)
        if isinstance(found, list):
            return [self.value(x, hosts=hosts) for x in found]
        if isinstance(found, dict):
            return {self.text(k, hosts=hosts): self.value(v, hosts=hosts) for k, v in found.items()}
        return found

    def key(self, key: str) -> str:
        """A question, cleaned like the answers that lead to it."""
        question, *rest = json.loads(key)
        system = bool(rest) and str(rest[0]).startswith(_SYSTEM)
        return json.dumps([question, *(self.value(part, hosts=not system) for part in rest)])


def without_serial(config: str) -> str:
    """A PCI configuration space (bytes as latin-1) without the device's serial number."""
    space = bytearray(config.encode("latin-1"))
    for identifier, at in list(extended_capabilities(bytes(space))):
        if identifier == _SERIAL_NUMBER:
            space[at + 4 : at + 12] = bytes(len(space[at + 4 : at + 12]))
    return space.decode("latin-1")


def scrubbed(answers: dict[str, dict[str, Any]], host_names: list[str]) -> tuple[dict[str, Any], Scrubber]:
    """Answers without what names the machine. Questions are cleaned like answers, so that
    each still finds its own."""
    scrubber = Scrubber(host_names)
    return {scrubber.key(k): scrubber.answer(k, a) for k, a in answers.items()}, scrubber


def save(path: str, recorded: RecordingSource, request: dict[str, Any]) -> None:
    """Write the capture, for this user alone. Raises FileError."""
    host = recorded.uname()[1]
    answers, scrubber = scrubbed(recorded.answers, [host])
    clean = CapturedSource(answers)
    parts = {
        "capture.json": clean.to_json(),
        "request.json": json.dumps({"schema": SCHEMA, **scrubber.value(request)}, indent=1),
    }
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, text in parts.items():
            raw = text.encode("utf-8", "surrogatepass")
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    outfile.write(path, made.getvalue(), private=True)


def restore(path: str) -> tuple[CapturedSource, dict[str, Any]]:
    """(the source, what was asked) of a capture. Raises OSError, ArgumentError for what is no regular file,
    and ValueError for anything else that is no capture."""
    try:
        with open(path, "rb", opener=regular.opener) as f, tarfile.open(fileobj=f, mode="r:") as tar:
            parts = {name: _part(tar, name) for name in ("capture.json", "request.json")}
    except tarfile.TarError as e:
        raise ValueError(f"no capture: {e}") from e
    try:
        request = json.loads(parts["request.json"])
    except RecursionError as e:
        raise ValueError("no capture: its request is nested too deeply") from e
    if not isinstance(request, dict) or request.get("schema") != SCHEMA:
        raise ValueError(f"no request of schema {SCHEMA}")
    for name in ("paths", "devices"):
        words = request.get(name, [])
        if not isinstance(words, list) or not all(isinstance(w, str) and w for w in words):
            raise ValueError(f"request.json: {name} is no list of names")
    kept, default = request.get("settings", {}), Settings()
    if not isinstance(kept, dict):
        raise ValueError(f"request.json: settings is {json_kind(kept)}, expected an object")
    for name, value in kept.items():
        if type(value) is not type(getattr(default, name, value)):
            raise ValueError(f"request.json: the setting {name} is {json_kind(value)}")
    return CapturedSource.from_json(parts["capture.json"]), request


def _part(tar: tarfile.TarFile, name: str) -> str:
    try:
        info = tar.getmember(name)
    except KeyError as e:
        raise ValueError(f"no capture: it holds no {name}") from e
    if not info.isfile() or info.size > MOST_NBYTES:
        raise ValueError(f"no capture: {name} is no file of a sane size")
    member = tar.extractfile(info)
    return "" if member is None else member.read().decode("utf-8", "surrogatepass")
