#!/usr/bin/env python3
# /// script
# requires-python = ">=3.9"
# dependencies = ["torch==2.8.0", "transformers==4.57.1", "numpy"]
# ///
"""Write the reference dumps that test_gpt compares itself with (their format: README.md beside this file).

    python3 dev/reference/make_reference.py            # writes all four folders beside this script
    python3 dev/reference/make_reference.py --only llama64 --report   # one of them; also prints how noisy each tensor is

One thread and a fixed seed: the same versions on the same kind of machine give the same bytes.
Elsewhere the results differ by rounding: write only what is new (--only).
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PINNED = {"torch": "2.8.0", "transformers": "4.57.1"}

try:
    import torch
    import torch.nn.functional as F
    import transformers
except ImportError as error:
    sys.exit(f"make_reference.py needs torch=={PINNED['torch']} transformers=={PINNED['transformers']} "
             f"numpy ({error}); install them in a virtual environment, "
             "or run this file with a tool that reads its header, e.g. `uv run`")

SEED = 20240520

# What a bare optimizer step can get wrong shows only if the numbers let it: eps is large enough to matter beside
# sqrt(v) for the smaller gradients, beta2 is small enough that ten steps move v, and weight decay is strong enough
# that forgetting it (or decaying a norm) moves weights by far more than rounding.
HYPER = {"lr": 2e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-5, "weight_decay": 0.1, "steps": 10}

# The clip of each model is chosen below from its own gradient norms: the middle of the ten, so that it is
# active in some steps and not in others.

# The place of a model gives its seed: new ones go to the end.
MODELS = {
    "llama": dict(
        config=lambda: transformers.LlamaConfig(
            vocab_size=300, hidden_size=32, intermediate_size=88, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=10000.0,
            # With 16 original positions the three bands of llama3 scaling (kept, blended, divided) all occur.
            rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 16},
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=None),
        batch=(3, 24)),
    "qwen2": dict(
        config=lambda: transformers.Qwen2Config(
            vocab_size=269, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1000000.0,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=None),
        batch=(2, 37)),
    "qwen3": dict(
        config=lambda: transformers.Qwen3Config(
            vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=24, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1000000.0,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=None),
        batch=(2, 29)),
    # head_dim 64 takes a BF16 build through its attention on tensor cores. T is several of its tiles of keys (64 forward,
    # 128 backward) and the last is not full; everything else is small.
    "llama64": dict(
        config=lambda: transformers.LlamaConfig(
            vocab_size=67, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=1, head_dim=64, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=10000.0,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=None),
        batch=(2, 197)),
}


def check_versions() -> None:
    """Another version may round differently, and the committed dumps would no longer be reproducible."""
    for module, wanted in ((torch, PINNED["torch"]), (transformers, PINNED["transformers"])):
        found = module.__version__.split("+")[0]
        if found != wanted:
            sys.exit(f"make_reference.py wants {module.__name__} {wanted}, found {found}; "
                     f"pip install {module.__name__}=={wanted}")


def initial_weights(model: torch.nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random weights by Hugging Face name, float32 values that bf16 holds exactly.

    Scaled so that everything takes part: activations stay near 1, attention is neither uniform nor one-hot,
    and no gradient is buried in rounding.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        if len(shape) == 1 and "norm" in name:
            value = 1.0 + 0.2 * noise
        elif len(shape) == 1:
            value = 0.3 * noise  # q/k/v bias
        elif "embed_tokens" in name or "lm_head" in name:
            value = noise / shape[1] ** 0.5
        elif "q_proj" in name or "k_proj" in name:
            value = 1.3 * noise / shape[1] ** 0.5
        else:
            value = noise / shape[1] ** 0.5
        weights[name] = value.to(torch.bfloat16).to(torch.float32).contiguous()
    return weights


def random_batch(vocab: int, batch: tuple[int, int], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and targets, int64 (B, T). Some tokens repeat (so embedding gradients have several addends), the
    largest id occurs, and the targets hold single masked positions and, in row 0, a masked prompt."""
    rows, length = batch
    stream = torch.randint(0, vocab, (rows, length + 1), generator=generator)
    common = torch.randint(0, vocab, (4,), generator=generator)
    repeat = torch.rand((rows, length + 1), generator=generator) < 0.35
    stream = torch.where(repeat, common[torch.randint(0, 4, (rows, length + 1), generator=generator)], stream)
    stream[-1, 1] = vocab - 1
    stream[0, 5] = 0
    input_ids, targets = stream[:, :-1].clone(), stream[:, 1:].clone()
    targets[torch.rand((rows, length), generator=generator) < 0.15] = -1
    targets[0, : length // 3] = -1
    return input_ids, targets


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the valid targets, in nats; logits are widened to float32 as transformers does."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.view(-1, wide.shape[-1]), targets.reshape(-1), ignore_index=-1)


def build(make_config, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.nn.Module:
    config = make_config()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        sys.exit(f"weights do not fit the model: missing {missing}, unexpected {unexpected}")
    # The fp32 inv_freq buffer must stay fp32, as it does in a model loaded with torch_dtype=bfloat16.
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    model = model.to(dtype)
    model.model.rotary_emb.inv_freq = inv_freq
    return model.train()


def train(make_config, weights: dict[str, torch.Tensor], input_ids: torch.Tensor, targets: torch.Tensor,
          dtype: torch.dtype, clip: float) -> dict[str, torch.Tensor]:
    """Logits, loss and gradients at the initial weights, then ten AdamW steps on the same batch.

    Below float32 the model and its gradients are `dtype`, and AdamW works on float32 master weights.
    """
    model = build(make_config, weights, dtype)
    state = torch.float64 if dtype == torch.float64 else torch.float32
    names = [name for name, _ in model.named_parameters()]
    parameters = dict(model.named_parameters())
    master = {name: torch.nn.Parameter(weights[name].to(state, copy=True)) for name in names}
    optimizer = torch.optim.AdamW(
        [{"params": [master[n] for n in names if master[n].dim() >= 2], "weight_decay": HYPER["weight_decay"]},
         {"params": [master[n] for n in names if master[n].dim() < 2], "weight_decay": 0.0}],
        lr=HYPER["lr"], betas=(HYPER["beta1"], HYPER["beta2"]), eps=HYPER["eps"], foreach=False)

    out: dict[str, torch.Tensor] = {}
    losses, norms = [], []
    for step in range(HYPER["steps"]):
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = loss_of(logits, targets)
        loss.backward()
        if step == 0:
            out["logits"] = logits.detach().clone()
            for name in names:
                out[f"grad.{name}"] = parameters[name].grad.detach().clone()
        for name in names:
            master[name].grad = parameters[name].grad.detach().to(state)
        losses.append(loss.detach().to(state))
        norms.append(torch.nn.utils.clip_grad_norm_(list(master.values()), clip, foreach=False).detach().to(state))
        optimizer.step()
        with torch.no_grad():
            for name in names:
                parameters[name].copy_(master[name])
    out["losses"], out["grad_norms"] = torch.stack(losses), torch.stack(norms)
    out["loss"] = out["losses"][:1].clone()
    for name in names:
        out[f"final.{name}"] = master[name].detach().clone()
    return out


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2 distance of a from b."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def report(name: str, float64: dict, float32: dict, bfloat16: dict) -> None:
    print(f"{name}: losses {[round(float(x), 4) for x in float32['losses']]}")
    print(f"{name}: norms  {[round(float(x), 4) for x in float32['grad_norms']]}")
    print(f"  {'tensor':58} {'rms':>10} {'fp32 noise':>11} {'bf16 noise':>11}   (relative L2)")
    for key, value in float32.items():
        print(f"  {key:58} {float(value.double().pow(2).mean().sqrt()):10.2e} "
              f"{distance(value, float64[key]):11.1e} {distance(bfloat16[key], value):11.1e}")


def attention_spread(make_config, weights: dict[str, torch.Tensor], input_ids: torch.Tensor) -> float:
    """Mean over queries of (largest attention weight) x (keys seen): 1 would be uniform attention."""
    model = build(make_config, weights, torch.float32)
    attentions = model(input_ids=input_ids, use_cache=False, output_attentions=True).attentions
    length = input_ids.shape[1]
    seen = torch.arange(1, length + 1, dtype=torch.float32)
    return float(torch.stack([(a.detach().max(dim=-1).values * seen).mean() for a in attentions]).mean())


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file. Written by hand because the library's order of metadata changes from run to run."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32"}
    header: dict = {"__metadata__": metadata}
    blobs, offset = [], 0
    for key, value in tensors.items():
        blob = value.contiguous().view(torch.uint8).numpy().tobytes()
        header[key] = {"dtype": names[value.dtype], "shape": list(value.shape),
                       "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    os.replace(temporary, path)


def make(name: str, folder: Path, show_report: bool) -> int:
    """Writes one model's folder; returns its bytes."""
    generator = torch.Generator().manual_seed(SEED + list(MODELS).index(name))
    make_config, batch = MODELS[name]["config"], MODELS[name]["batch"]
    config = make_config()
    skeleton = transformers.AutoModelForCausalLM.from_config(config)
    weights = initial_weights(skeleton, generator)
    input_ids, targets = random_batch(config.vocab_size, batch, generator)

    probe = train(make_config, weights, input_ids, targets, torch.float32, 1e30)["grad_norms"]
    middle = probe.sort().values[HYPER["steps"] // 2 - 1: HYPER["steps"] // 2 + 1].mean()
    clip = float(f"{float(middle):.3g}")
    run = {dtype: train(make_config, weights, input_ids, targets, dtype, clip)
           for dtype in (torch.float64, torch.float32, torch.bfloat16)}
    active = sum(float(norm) > clip for norm in run[torch.float32]["grad_norms"])
    if not 2 <= active <= HYPER["steps"] - 2:
        sys.exit(f"{name}: clip {clip} is active in {active} of {HYPER['steps']} steps; choose another")
    closest = min(abs(float(norm) / clip - 1) for norm in run[torch.float32]["grad_norms"])
    if show_report:
        report(name, run[torch.float64], run[torch.float32], run[torch.bfloat16])
        print(f"  clip {clip}: active in {active} steps, closest norm {closest:.1%} away; attention peak x keys "
              f"{attention_spread(make_config, weights, input_ids):.2f} (uniform: 1); "
              f"{int((targets >= 0).sum())} of {targets.numel()} targets valid")

    tensors = {"input_ids": input_ids.to(torch.int32), "targets": targets.to(torch.int32)}
    for key, value in run[torch.float32].items():
        tensors[f"float32.{key}"] = value.float()
    for key, value in run[torch.bfloat16].items():
        keep = torch.bfloat16 if key == "logits" or key.startswith("grad.") else torch.float32
        tensors[f"bfloat16.{key}"] = value.to(keep)

    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(skeleton).__name__]
    (folder / "config.json").write_text(config.to_json_string())
    write(folder / "model.safetensors", weights, {"format": "pt"})
    metadata = {key: repr(value) for key, value in HYPER.items()}
    metadata.update(clip=repr(clip), torch=PINNED["torch"], transformers=PINNED["transformers"])
    write(folder / "reference.safetensors", tensors, metadata)
    size = sum(file.stat().st_size for file in folder.iterdir())
    parameters = sum(value.numel() for value in weights.values())
    print(f"{folder}: {parameters} parameters, clip {clip}, {size} bytes")
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="folder to write into")
    parser.add_argument("--only", choices=sorted(MODELS), help="write one model")
    parser.add_argument("--report", action="store_true", help="print the size and noise of every tensor")
    arguments = parser.parse_args()
    check_versions()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    names = [arguments.only] if arguments.only else sorted(MODELS)
    total = sum(make(name, arguments.out / name, arguments.report) for name in names)
    print(f"total {total / 1e6:.2f} MB (the repository keeps these under 4 MB)")


if __name__ == "__main__":
    main()
