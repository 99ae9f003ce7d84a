"""Claims of docs/guides/preload.md that need a GPU: real libraries that broke other preloads.

    PYTHONPATH=.:src:.gpu-deps python3 lab/gpu/preloads.py FOLDER [NAME ...] [--minutes 9]

Every program runs alone, then under `eclip exec` as a service and as background. It passes if each
run ends in time, with status 0, and says the same. What a program needs and the host lacks is told.
FOLDER/preloads.jsonl keeps the rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

LIMIT_S = 150.0
MISSING = 77  # the exit status of a program that cannot run here, with the reason in its last line
WAYS: dict[str, list[str]] = {
    "alone": [],
    "service": ["exec", "--service", "--"],
    "background": ["exec", "--background", "--"],
}

_PRELUDE = """
import ctypes, hashlib, importlib.util, os, sys
def need(name):
    if importlib.util.find_spec(name) is None:
        print(f"{name} is not installed"); sys.exit(77)
need("torch")
import torch
if not torch.cuda.is_available():
    print("PyTorch finds no GPU"); sys.exit(77)
def tell(tensor):
    print(hashlib.sha256(tensor.detach().float().cpu().numpy().tobytes()).hexdigest()[:16])
torch.manual_seed(1)
torch.use_deterministic_algorithms(True, warn_only=True)
"""
_NCCL = """
need("nvidia.nccl")
folder = importlib.util.find_spec("nvidia.nccl").submodule_search_locations[0]
nccl = ctypes.CDLL(os.path.join(folder, "lib", "libnccl.so.2"))
class Id(ctypes.Structure): _fields_ = (("bytes", ctypes.c_char * 128),)
def check(status):
    assert status == 0, f"NCCL gives status {status}"
torch.cuda.init()
name, comm = Id(), ctypes.c_void_p()
check(nccl.ncclGetUniqueId(ctypes.byref(name)))
nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, Id, ctypes.c_int]
check(nccl.ncclCommInitRank(ctypes.byref(comm), 1, name, 0))
given = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
found = torch.zeros_like(given)
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
pointer, size = ctypes.c_void_p, ctypes.c_size_t
nccl.ncclAllReduce.argtypes = [pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer]
for _ in range(50):
    check(nccl.ncclAllReduce(given.data_ptr(), found.data_ptr(), given.numel(), 7, 0, comm,
                             stream.cuda_stream))
stream.synchronize()
tell(found)
"""
# What broke, and the program. One GPU is enough for each.
PROGRAMS = {
    "graphs": """
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda().half().eval()
pool, graphs, stream = torch.cuda.graph_pool_handle(), {}, torch.cuda.Stream()
with torch.no_grad():
    model(torch.zeros(64, 512, device="cuda").half())
    for size in range(64, 0, -3):  # the largest first, in one pool, as vLLM captures
        given = torch.randn(size, 512, device="cuda").half()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            found = model(given)
        graphs[size] = graph, given, found
    for round in range(300):
        graph, given, found = list(graphs.values())[round % len(graphs)]
        graph.replay()
        given.copy_(found)
torch.cuda.synchronize()
for graph, given, found in graphs.values(): tell(found)
""",
    "vllm": """
need("vllm")
import json, tempfile
folder = tempfile.mkdtemp()
with open(os.path.join(folder, "config.json"), "w") as file:
    json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
               "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16,
               "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 2048,
               "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16"}, file)
from vllm import LLM, SamplingParams
engine = LLM(folder, load_format="dummy", skip_tokenizer_init=True, gpu_memory_utilization=0.2,
             max_model_len=512, seed=1)
asked = [{"prompt_token_ids": list(range(1 + n, 60 + 3 * n))} for n in range(16)]
greedy = SamplingParams(temperature=0, max_tokens=32, detokenize=False)
for answer in engine.generate(asked, greedy):
    print(*answer.outputs[0].token_ids)
""",
    "nccl": _NCCL,
    "nccl-cumem": "os.environ['NCCL_CUMEM_ENABLE'] = '1'\n" + _NCCL,
    "peers": """
count = torch.cuda.device_count()
print(count, [[torch.cuda.can_device_access_peer(a, b) for b in range(count) if a != b]
              for a in range(count)])
driver = ctypes.CDLL("libcuda.so.1")
can = ctypes.c_int()
print([driver.cuDeviceCanAccessPeer(ctypes.byref(can), a, b) for a, b in ((0, 0), (0, 9), (9, 0))])
need("torch.distributed._symmetric_memory")
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
given = symmetric.empty(1024, device="cuda").fill_(3)
handle = symmetric.rendezvous(given, dist.group.WORLD)
tell(handle.get_buffer(0, (1024,), torch.float32))
dist.destroy_process_group()
""",
    "cudnn": """
print(torch.backends.cudnn.version())
model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
                            torch.nn.Conv2d(32, 64, 3, stride=2)).cuda()
torch.backends.cudnn.deterministic = True
steps = torch.optim.SGD(model.parameters(), lr=0.1)
given = torch.randn(8, 3, 64, 64, device="cuda")
for _ in range(5):
    steps.zero_grad()
    model(given).square().mean().backward()
    steps.step()
for parameter in model.parameters(): tell(parameter)
""",
}
NOT_HERE = {
    "wsl": "needs Windows' driver",
    "window": "needs a display and driver 595 or newer",
    "rocm": "needs an AMD GPU and ROCm 7",
}


def run(program: Path, way: Sequence[str]) -> tuple[int, str]:
    """The exit status and what was said; 124: it did not end in time."""
    command = [sys.executable, "-m", "eclip", *way] if way else []
    try:
        done = subprocess.run(
            [*command, sys.executable, str(program)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    lines = done.stdout.splitlines()
    if done.returncode not in (0, MISSING):
        lines = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return done.returncode, "\n".join(lines)


def verdict(name: str, folder: Path, until_s: float) -> dict[str, str]:
    """A row: passed, failed or not tried, and why."""
    if name in NOT_HERE:
        return {"name": name, "verdict": "not tried", "why": NOT_HERE[name]}
    program = folder / f"{name}.py"
    program.write_text(_PRELUDE + PROGRAMS[name])
    alone = ""
    for way, words in WAYS.items():
        if time.monotonic() > until_s:
            return {"name": name, "verdict": "not tried", "why": "no time was left"}
        status, said = run(program, words)
        if status == MISSING:
            return {"name": name, "verdict": "not tried", "why": said.splitlines()[-1]}
        if status != 0 and way == "alone":
            return {"name": name, "verdict": "not tried", "why": f"fails alone: {said}"}
        if status != 0:
            return {"name": name, "verdict": "failed", "why": f"{way}: status {status}, {said}"}
        if way == "alone":
            alone = said
        elif said != alone:
            return {"name": name, "verdict": "failed", "why": f"{way}: other results than alone"}
    return {"name": name, "verdict": "passed", "why": ""}


def versions() -> str:
    """Of the driver and the libraries."""
    asked = (
        "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda, 'NCCL', "
        "torch.cuda.nccl.version(), 'cuDNN', torch.backends.cudnn.version())"
    )
    said = []
    for command in (
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        [sys.executable, "-c", asked],
        [sys.executable, "-c", "import vllm; print('vllm', vllm.__version__)"],
    ):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        said += done.stdout.split("\n")[-2:-1]
    return "; ".join(said)


def main() -> None:
    every = [*PROGRAMS, *NOT_HERE]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(every)}; all by default")
    parser.add_argument("--minutes", type=float, default=9.0)
    given = parser.parse_args()
    if unknown := set(given.names) - set(every):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    until_s = time.monotonic() + 60 * given.minutes
    given.folder.mkdir(parents=True, exist_ok=True)
    print(versions() or "no driver and no PyTorch")
    with tempfile.TemporaryDirectory() as place:
        for name in given.names or every:
            row = verdict(name, Path(place), until_s)
            print(f"{row['name']:12} {row['verdict']:10} {row['why']}", flush=True)
            with (given.folder / "preloads.jsonl").open("a") as file:
                file.write(json.dumps({**row, "with": versions()}) + "\n")


if __name__ == "__main__":
    main()
