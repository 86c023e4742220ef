"""Counters of what a hand uses: they change with it, and nothing else is counted."""

from pathlib import Path

from port_agent.facts import Answer
from port_agent.facts.idle import InputMonitor
from port_agent.facts.input_devices import read_counters
from port_agent.facts.sysfs import Tree
from tests.agent.facts.machines import OPTIONS
from tests.agent.trees import write_tree

INTERRUPTS = """           CPU0       CPU1
  1:          4      {keys}   IO-APIC    1-edge      i8042
 38:         10         20   IR-IO-APIC  51-fasteoi  SYNA8018:00
 39:        999        999   IR-IO-APIC  50-fasteoi  INT34C5:00
NMI:          0          0   Non-maskable interrupts
"""


def device(root: Path, number: int, place: str, name: str, events: str, properties: str = "0") -> None:
    """Write an input device as the kernel shows it: a link from its class to where it is plugged in."""
    folder = root / "sys/devices" / place / f"input/input{number}"
    files = {"name": name, "capabilities/ev": events, "properties": properties, f"event{number}/dev": "13:64"}
    write_tree(folder, files)
    (folder / f"event{number}/device").symlink_to(folder)
    link = root / f"sys/class/input/event{number}"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder / f"event{number}")


def machine(root: Path) -> Tree:
    device(root, 0, "pci/usb1/1-2/1-2:1.0/hid", "USB Keyboard", "120013")
    device(root, 1, "pci/usb1/1-3/1-3:1.0/hid", "USB Mouse", "17")
    device(root, 2, "i2c/SYNA8018:00/hid", "SYNA8018:00 06CB:CE67 Touchpad", "1b", "5")
    device(root, 3, "platform/button", "Power Button", "3")
    device(root, 4, "pci/usb1/1-4/1-4:1.0/hid", "UPS", "1")
    counts = {"1-2/urbnum": "40", "1-3/urbnum": "7", "1-4/urbnum": "90000", "urbnum": "5"}
    write_tree(root / "sys/devices/pci/usb1", counts)
    write_tree(root / "proc", {"interrupts": INTERRUPTS.format(keys=6)})
    return Tree(root / "sys", root / "proc", root / "dev")


def test_what_a_hand_uses_is_counted(tmp_path: Path) -> None:
    tree = machine(tmp_path)
    counters = {"USB Keyboard": 40, "USB Mouse": 7, "SYNA8018:00": 30, "i8042": 10}
    assert read_counters(tree) == counters and tree.take_faults() == ()
    assert read_counters(Tree(tmp_path / "no", tmp_path / "no")) == {}


def test_a_key_and_a_move_are_a_person(tmp_path: Path) -> None:
    tree, monitor = machine(tmp_path), InputMonitor()

    def idle(now_s: float) -> Answer:
        monitor.look(read_counters(tree), now_s)
        return monitor.signal("input", OPTIONS, now_s, "none").idle

    assert (idle(0.0), idle(60.0)) == (Answer.NO, Answer.YES), "what nobody watched may have been used"
    write_tree(tmp_path, {"sys/devices/pci/usb1/1-3/urbnum": "8"})
    assert (idle(61.0), idle(121.0)) == (Answer.NO, Answer.YES)
    write_tree(tmp_path, {"proc/interrupts": INTERRUPTS.format(keys=7)})
    assert idle(122.0) is Answer.NO
    assert monitor.signal("input", OPTIONS, 122.0, "none").detail == "last input 0 s ago (i8042)"


def test_a_class_that_cannot_be_listed_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class/input").symlink_to("input")
    tree = Tree(sys=tmp_path, proc=tmp_path)
    read_counters(tree)
    assert [fault.sensor for fault in tree.take_faults()] == ["input"]
