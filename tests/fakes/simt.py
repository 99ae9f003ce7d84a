"""CUDA source compiled for the CPU, on ``simt.h``: kernels are launched by name on NumPy arrays."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

COMPILER = shutil.which("g++")
_KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\([\w, ]+\)\s+)?(\w+)\((.*?)\)\s*\{', re.S
)


class Emulated:
    """The kernels of one source. ``condition`` is what the last kernel to say so has set."""

    def __init__(self, text: str, folder: Path, options: Sequence[str] = ()) -> None:
        self.signatures = {
            name: [part.strip() for part in parameters.split(",")]
            for name, parameters in _KERNEL.findall(text)
        }
        # Few threads keep it fast; the tile shrinks with them. Declared for device code only:
        text = text.replace("THREADS = 256", "THREADS = 64")
        text = re.sub(r'extern "C" __device__ void cudaGraphSetConditional.*\n', "", text)
        text = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", r"__shared__ \1 \2[4096];", text)
        text = re.sub(r"__shared__ (\w+) (\w+)(\[[^;]+\])?;", _by_block, text)
        calls = "\n".join(
            f'if (!strcmp(name, "{name}")) return launch(across, down, threads, [=] {{ {name}('
            + ", ".join(_argument(kind, index) for index, kind in enumerate(parameters))
            + "); });"
            for name, parameters in self.signatures.items()
        )
        entry = (
            'extern "C" void start(const char* name, unsigned across, unsigned down, '
            f"unsigned threads, const u64* words) {{\n{calls}\n}}\n"
            'extern "C" unsigned read_condition() { return condition; }\n'
        )
        header = Path(__file__).with_name("simt.h").read_text()
        program = folder / "kernels.cpp"
        program.write_text(header + text + entry)
        library = folder / "kernels.so"
        command = [str(COMPILER), "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
        subprocess.run([*command, *options, str(program), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    def __call__(
        self,
        name: str,
        grid: int | tuple[int, int],
        *arguments: np.ndarray | float,
        threads: int = 64,
    ) -> None:
        parameters = self.signatures[f"eclip_{name}"]
        if len(arguments) != len(parameters):
            raise TypeError(f"{name} takes {len(parameters)} arguments, not {len(arguments)}")
        words = (ctypes.c_uint64 * len(arguments))(
            *(_word(kind, one) for kind, one in zip(parameters, arguments, strict=True))
        )
        across, down = grid if isinstance(grid, tuple) else (grid, 1)
        self._library.start(f"eclip_{name}".encode(), across, down, threads, words)

    @property
    def condition(self) -> bool:
        return bool(self._library.read_condition())


def _by_block(declaration: re.Match[str]) -> str:
    """Shared memory that is static in C++, one for every block."""
    kind, name, size = declaration.groups()
    held = f"static {kind} {name}_of[MOST_BLOCKS]{size or ''};"
    return f"{held} auto& {name} = {name}_of[block_number()];"


def _argument(parameter: str, index: int) -> str:
    kind = parameter.rsplit(" ", 1)[0]
    if kind == "float":
        return f"[&] {{ float v; memcpy(&v, words + {index}, 4); return v; }}()"
    return f"({kind})words[{index}]"


def _word(parameter: str, value: np.ndarray | float) -> int:
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    if parameter.startswith("float "):
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value)
