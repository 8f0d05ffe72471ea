"""The command line: ``python -m te_attn_ops {doctor,explain,bench}``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import te_attn_ops

from . import doctor, environment
from .backends import BACKEND_NAMES
from .explain import explain
from .masks import PADDING_MASK_TYPES, Band, resolve_mask
from .params import AttentionParams, seqlen_bucket
from .policies import DISPATCHES

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_DTYPES |= {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 for success, 1 for a negative answer, 2 for wrong arguments (by way of SystemExit)."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.run is not _bench:
        arguments.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    code: int = arguments.run(arguments, rest)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m te_attn_ops",
        description="Attention for packed (THD) batches: which kernel runs, whether it is right, how fast it is.",
    )
    parser.add_argument("--version", action="version", version=f"te_attn_ops {te_attn_ops.__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    check = commands.add_parser(
        "doctor",
        help="versions, device, and a self-test of each installed backend",
        description="Shows versions and the device, and compares each installed backend with the unfused one. Exit code 0 if every "
        "installed backend passes (one that is for other devices does not count), 1 otherwise.",
    )
    check.add_argument("--json", action="store_true", help="print JSON instead of text")
    check.set_defaults(run=_doctor, parser=check)
    why = commands.add_parser(
        "explain",
        help="which backend takes an attention call, why, and why not the others",
        description="Explains the choice for one kind of attention call on this machine. Exit code 1 if nothing can run it.",
    )
    _add_explain_arguments(why)
    why.set_defaults(run=_explain, parser=why)
    bench = commands.add_parser(
        "bench",
        add_help=False,
        help="run the benchmarks (in a checkout; takes the arguments of python -m benchmarks)",
    )
    bench.set_defaults(run=_bench, parser=bench)
    return parser


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("shape")
    shape.add_argument("--head-dim-qk", type=_positive, default=128, metavar="N", help="width of queries and keys (default 128)")
    shape.add_argument("--head-dim-v", type=_positive, metavar="N", help="width of values (default: that of queries)")
    shape.add_argument("--num-heads", type=_positive, default=16, metavar="N", help="query heads (default 16)")
    shape.add_argument("--num-gqa-groups", type=_positive, metavar="N", help="key and value heads (default: as many)")
    shape.add_argument("--max-seqlen-q", type=_positive, default=4096, metavar="N", help="longest query sequence (default 4096)")
    shape.add_argument("--max-seqlen-kv", type=_positive, metavar="N", help="longest key sequence (default: that of queries)")
    shape.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="default bfloat16")
    mask = parser.add_argument_group("mask")
    mask.add_argument("--attn-mask-type", choices=PADDING_MASK_TYPES, help="default padding_causal")
    mask.add_argument("--window-size", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="tokens, -1 for unbounded")
    mask.add_argument("--bottom-right-diagonal", action=argparse.BooleanOptionalAction, help="alignment of a padding mask's window")
    mask.add_argument(
        "--policy",
        action="append",
        metavar="MASK[:LEFT,RIGHT]",
        help="a policy of a mixed batch, for example padding_causal or padding:256,0; give one option per policy",
    )
    mask.add_argument("--unequal-lengths", action="store_true", help="sequences may have more key than query tokens, or fewer")
    mask.add_argument("--gaps", action="store_true", help="padding between sequences (cu_seqlens_*_padded)")
    call = parser.add_argument_group("call")
    call.add_argument("--training", action="store_true", help="a backward will follow")
    call.add_argument("--deterministic", action="store_true", help="the backward must be reproducible bit for bit")
    call.add_argument("--return-max-logit", action="store_true", help="the largest score per head is wanted")
    call.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
    override = parser.add_argument_group("overrides")
    override.add_argument("--backend", choices=BACKEND_NAMES, help="ask for one backend")
    override.add_argument("--pad-head-dim", action=argparse.BooleanOptionalAction, help="force or forbid padding to one width")
    override.add_argument("--dispatch", choices=DISPATCHES, default="auto", help="of a mixed batch (default auto)")
    override.add_argument("--selection", choices=("static", "measured"), help="default TE_ATTN_OPS_SELECTION or static")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return value


# ------------------------------------------------------------------------------------------------------------------- commands
def _doctor(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    report = doctor.examine()
    print(json.dumps(report.to_dict(), indent=1) if arguments.json else report)
    return 0 if report.passed else 1


def _explain(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    try:
        params = _params(arguments)
        if arguments.dispatch != "auto" and not arguments.policy:
            raise ValueError(f"--dispatch {arguments.dispatch} needs --policy")
    except ValueError as error:
        arguments.parser.error(str(error))
    explanation = explain(
        params,
        backend=arguments.backend,
        pad_head_dim=arguments.pad_head_dim,
        thd_attention_policy_dispatch=arguments.dispatch,
        selection=arguments.selection,
    )
    if arguments.json:
        print(json.dumps(explanation.to_dict(), indent=1))
    else:
        explanation.print()
    return 0 if explanation.winner is not None else 1


def _bench(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    root = Path(te_attn_ops.__file__).resolve().parent.parent
    if not (root / "benchmarks" / "__main__.py").is_file():
        arguments.parser.error(f"there are no benchmarks in {root}: run this in a checkout of the repository")
    return subprocess.run([sys.executable, "-m", "benchmarks", *rest], cwd=root, check=False).returncode


# ------------------------------------------------------------------------------------------------------------------ arguments
def _params(arguments: argparse.Namespace) -> AttentionParams:
    """Raises ValueError, for whoever typed the arguments."""
    max_seqlen_kv = arguments.max_seqlen_kv or arguments.max_seqlen_q
    equal_lengths = not arguments.unequal_lengths and max_seqlen_kv == arguments.max_seqlen_q
    groups = arguments.num_gqa_groups or arguments.num_heads
    if arguments.num_heads % groups:
        raise ValueError(f"--num-heads must be a multiple of --num-gqa-groups, got {arguments.num_heads} and {groups}")
    return AttentionParams(
        dtype=_DTYPES[arguments.dtype],
        num_heads=arguments.num_heads,
        num_gqa_groups=groups,
        head_dim_qk=arguments.head_dim_qk,
        head_dim_v=arguments.head_dim_v or arguments.head_dim_qk,
        bands=tuple(band.canonical(equal_lengths) for band in _bands(arguments)),
        max_seqlen_q=seqlen_bucket(arguments.max_seqlen_q),
        max_seqlen_kv=seqlen_bucket(max_seqlen_kv),
        equal_lengths=equal_lengths,
        has_gaps=arguments.gaps,
        is_training=arguments.training,
        deterministic=arguments.deterministic,
        return_max_logit=arguments.return_max_logit,
        **_device(arguments.device),
    )


def _bands(arguments: argparse.Namespace) -> tuple[Band, ...]:
    if not arguments.policy:
        mask_type = arguments.attn_mask_type or "padding_causal"
        return (_band(mask_type, arguments.window_size, arguments, ""),)
    if arguments.attn_mask_type is not None or arguments.window_size is not None:
        raise ValueError("--policy cannot stand beside --attn-mask-type or --window-size: each policy names its own")
    bands = []
    for policy in arguments.policy:
        mask_type, _, window = policy.partition(":")
        try:
            sides = [int(side) for side in window.split(",")] if window else None
        except ValueError:
            raise ValueError(f"--policy {policy}: a window is two numbers of tokens, for example padding:256,0") from None
        bands.append(_band(mask_type, sides, arguments, f"--policy {policy}: "))
    return tuple(bands)


def _band(mask_type: str, window: Sequence[int] | None, arguments: argparse.Namespace, prefix: str) -> Band:
    resolved = resolve_mask(mask_type, window, arguments.bottom_right_diagonal, argument_prefix=prefix)
    for warning in resolved.warnings:
        print(f"{prefix}{warning}", file=sys.stderr)
    return resolved.band


def _device(name: str) -> dict[str, Any]:
    try:
        device = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError:
        raise ValueError(f"--device {name}: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return {"device_type": "cpu", "sm": 0}
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if (device.index or 0) >= count:
        raise ValueError(f"--device {name}: there are {count} CUDA devices")
    index = device.index if device.index is not None else torch.cuda.current_device()
    return {"device_type": "cuda", "sm": environment.compute_capability(index), "device_index": index}


if __name__ == "__main__":
    sys.exit(main())
