"""`make amd-test`: the conformance suite and tests of masks on an AMD GPU, and a short table."""

from __future__ import annotations

import collections
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/conformance", "tests/amd")


def main() -> int:
    if not Path("/dev/kfd").exists():
        print("amd-test needs an AMD GPU and its driver: there is no /dev/kfd")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        # Of the suite those on the real GPU: their names end in hip], or in [hip-POLICY].
        chosen = ["-k", "(hip and not standin) or masks"]
        code = subprocess.run([sys.executable, *command, *chosen, *TESTS], cwd=ROOT).returncode
        print_table(report)
    return code


def print_table(report: Path) -> None:
    counts: dict[str, collections.Counter[str]] = {}
    for case in ET.parse(report).iter("testcase"):
        room = case.get("classname", "").split(".")[-1]
        outcome = next((child.tag for child in case if child.tag != "properties"), "passed")
        counts.setdefault(room, collections.Counter())[outcome] += 1
    print(f"\n{'':20}{'passed':>8}{'skipped':>9}{'failed':>8}")
    for room, count in counts.items():
        failed = count["failure"] + count["error"]
        print(f"{room:20}{count['passed']:>8}{count['skipped']:>9}{failed:>8}")


if __name__ == "__main__":
    raise SystemExit(main())
