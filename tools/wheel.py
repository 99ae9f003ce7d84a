"""Builds libeclip into a wheel. An editable install leaves it to `make native`."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LibeclipHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        if shutil.which("g++") is None or shutil.which("make") is None:
            self.app.display_warning("no g++ here: the wheel is built without libeclip")
            return
        subprocess.run(["make", "-C", str(Path(self.root) / "native"), "library"], check=True)
        build_data["artifacts"].append("src/eclip/lib/libeclip.so")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
