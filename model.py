"""Qwen3, and nothing about RL.

Owns the architecture (read from a checkpoint's config.json), the packed attention of training and prefill, and the
checkpoint format: Hugging Face parameter names, safetensors, every tensor accounted for. Knows nothing of sampling,
loss, optimiser, processes or the command line.

Everything is flat: T tokens of any number of sequences lie in one row, without padding. What makes them sequences is
the `attend` callable that the caller passes in, so training (PackedAttention below), prefill and cached decode
(rollout.py) run the very same layers:

    attend(layer, q (T, H, Dh), k (T, K, Dh), v (T, K, Dh)) -> (T, H, Dh)

T tokens, D model width, H query heads, K key/value heads, Dh head width, V vocabulary rows.
Reference: transformers' Qwen3ForCausalLM, which tests/test_model.py holds this file against.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from console import UserError

try:  # flash-attn is optional; torch's own kernel (2.10 and newer) serves as well
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None


@dataclass(frozen=True)
class Qwen3Config:
    """The architecture, under config.json's own names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # not hidden_size / num_attention_heads: Qwen3-4B has 2560, 32 heads and 128
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    initializer_range: float = 0.02

    @classmethod
    def from_json(cls, path):
        """Reads a config.json (old spelling `rope_theta` or new `rope_parameters`). UserError if it is not a Qwen3."""
        if not Path(path).is_file():
            raise UserError(f"{path} not found: a checkpoint folder holds config.json, tokenizer files and safetensors")
        raw = read_json(path)
        if raw.get("model_type") != "qwen3":
            raise UserError(f"{path}: model_type is {raw.get('model_type')!r}, this project runs 'qwen3' only")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope = rope if isinstance(rope, dict) else {"rope_type": rope}
        unsupported = {
            "attention_bias": raw.get("attention_bias", False) is not False,
            "use_sliding_window": raw.get("use_sliding_window", False) is not False,
            "hidden_act": raw.get("hidden_act", "silu") != "silu",
            "rope_type": rope.get("rope_type", rope.get("type", "default")) != "default",
        }
        for key in (key for key, bad in unsupported.items() if bad):
            raise UserError(f"{path}: {key} is set to something this project does not implement")
        values = {"rope_theta": rope.get("rope_theta"), **{k: v for k, v in raw.items() if v is not None}}
        return cls(**{name: _config_value(path, values, name, kind) for name, kind in cls.__annotations__.items()})

    def __post_init__(self):
        sizes = {name: value for name, value in vars(self).items() if name != "tie_word_embeddings"}
        wrong = [f"{name}={value}" for name, value in sizes.items() if not 0 < value < math.inf]
        if wrong:
            raise UserError(f"model config: {', '.join(wrong)}: must be positive")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise UserError(
                f"model config: {self.num_attention_heads} query heads must be a multiple of "
                f"{self.num_key_value_heads} key/value heads, and head_dim {self.head_dim} even"
            )


def _config_value(path, values, name, kind):
    defaults = {"initializer_range": 0.02}
    value = values.get(name, defaults.get(name))
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**48
    good = {bool: isinstance(value, bool), float: number, int: number and value == value // 1}
    if not good[kind]:
        raise UserError(f"{path}: {name} is {value!r}, expected {kind.__name__}")
    return kind(value)


def read_json(path):
    """The object in a JSON file; UserError naming the file if it is missing, malformed or not an object."""
    try:
        value = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({_first_line(error)})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


def _first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class PackedAttention:
    """Causal attention within each of several sequences that lie end to end in one row.

    cu_seqlens: (N+1,) ints, the boundaries [0, n_0, n_0+n_1, ..., T], kept on the host: reading them from the device
    would cost a synchronisation a layer. On CUDA one flash-attention call serves the whole row (flash-attn if it is
    installed, else torch's varlen_attn; both need a 16-bit dtype). Elsewhere each sequence is its own
    scaled_dot_product_attention call: no cross-sequence work, and a sequence's numbers do not depend on its neighbours.
    """

    def __init__(self, cu_seqlens, device="cpu"):
        self.lengths = [end - start for start, end in zip(cu_seqlens, cu_seqlens[1:])]
        self.longest = max(self.lengths)
        on_gpu = torch.device(device).type == "cuda"
        self.boundaries = torch.tensor(cu_seqlens, dtype=torch.int32, device=device) if on_gpu else None

    def __call__(self, layer, q, k, v):
        """q (T, H, Dh), k and v (T, K, Dh) -> (T, H, Dh)."""
        if self.boundaries is not None and q.dtype != torch.float32 and (flash_attn_varlen_func or varlen_attn):
            return self._flash(q, k, v)
        # split, not slices: the backward of a slice fills and adds a whole (T, H, Dh), once a sequence
        return torch.cat([_causal(*qkv) for qkv in zip(*(x.split(self.lengths) for x in (q, k, v)))])

    def _flash(self, q, k, v):
        bounds, longest = self.boundaries, self.longest
        if flash_attn_varlen_func:
            return flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=True)
        if q.shape[1] != k.shape[1]:  # varlen_attn's own enable_gqa came after torch 2.11; repeating works everywhere
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))


def _causal(q, k, v):
    # (n, heads, Dh) -> (1, heads, n, Dh); q and k have equal length, so is_causal's top-left mask is the right one
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)[0].transpose(0, 1)


def rope(positions, config, dtype):
    """Rotary angles (RoFormer, eq. 34): cos and sin, each (T, 1, Dh/2), computed in fp32 and cast to `dtype`.

    Computed at every forward from the positions: a stored table would have to survive meta devices and casts.
    """
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device).float() / config.head_dim
    angles = positions[:, None, None].float() * (1.0 / config.rope_theta**exponent)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x, cos, sin):
    """Rotates the pairs (x[i], x[i + Dh/2]) of x (T, heads, Dh) by the angles of `rope`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm on every query and key head (QK-norm)."""

    def __init__(self, config, layer):
        super().__init__()
        width, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.layer, self.head_dim = layer, dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=eps)
        self.k_norm = nn.RMSNorm(dim, eps=eps)

    def forward(self, x, cos, sin, attend):
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return self.o_proj(attend(self.layer, q, k, v).flatten(1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config, layer):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x, cos, sin, attend):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    """tokens -> hidden states; the head is a call of its own, because V is 151,936 and few positions need it."""

    def __init__(self, config, activation_checkpointing=False):
        super().__init__()
        self.config, self.activation_checkpointing = config, activation_checkpointing
        self.model = nn.Module()  # a namespace: Hugging Face's names start with "model."
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self):
        """(V, D): the output projection, which is the embedding itself in a tied model."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, tokens, positions, attend):
        """tokens (T,) and positions (T,) long, attend as in the module docstring -> hidden (T, D) in compute dtype."""
        assert tokens.shape == positions.shape and tokens.dim() == 1, (tokens.shape, positions.shape)
        x = self.model.embed_tokens(tokens)  # (T, D)
        cos, sin = rope(positions, self.config, x.dtype)
        for layer in self.model.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.model.norm(x)

    def logits(self, hidden):
        """hidden (N, D) -> fp32 logits (N, V), for sampling: the trainer's head is in rloo.py, in chunks.

        16-bit CUDA products have no gradient.
        """
        return matmul_fp32(hidden, self.head_weight)

    @torch.no_grad()
    def init_weights(self, seed=0):
        """Random weights as Hugging Face draws them: normal(0, initializer_range), norms 1. A function of the seed."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                draw = torch.empty(parameter.shape).normal_(0.0, self.config.initializer_range, generator=generator)
                parameter.copy_(draw)
        return self


def matmul_fp32(x, weight):
    """x (N, D) @ weight (M, D).T -> (N, M) in fp32. No gradient through the 16-bit CUDA form."""
    if x.dtype == torch.float32:
        return F.linear(x, weight)
    if x.is_cuda:  # bf16 operands, fp32 accumulation AND output: rounding logits to bf16 would cost 3 digits
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def empty_model(config, device, dtype):
    """A Qwen3 for sampling, with memory but no values yet: nothing is drawn at random only to be overwritten."""
    with torch.device("meta"):
        model = Qwen3(config)
    return model.to(dtype).to_empty(device=device).eval().requires_grad_(False)


def load_weights(model, model_dir, shard=lambda parameter: (parameter, slice(None))):
    """Fills every parameter of `model` from a folder's safetensors, casting to the parameter's dtype.

    Strict: a missing, unexpected or misshapen tensor is a UserError that lists all of them, and nothing is written.
    `shard(parameter) -> (local tensor, slice of rows)` lets a sharded model read only the rows it holds.
    """
    parameters = dict(model.named_parameters())
    where = tensor_files(model_dir)
    if model.config.tie_word_embeddings:
        where.pop("lm_head.weight", None)  # some exporters write the tied head a second time
    _check_names(model_dir, parameters, where)
    try:
        for path in sorted(set(where.values())):
            with safe_open(path, "pt") as file:
                for name in (name for name, home in where.items() if home == path):
                    local, rows = shard(parameters[name])
                    with torch.no_grad():
                        local.copy_(file.get_slice(name)[rows] if len(local) else local)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged safetensors file ({_first_line(error)})") from error


def _check_names(model_dir, parameters, where):
    shapes, integers = {}, []
    try:
        for path in set(where.values()):
            with safe_open(path, "pt") as file:
                for name in set(file.keys()) & {name for name, home in where.items() if home == path}:
                    tensor = file.get_slice(name)
                    shapes[name] = tuple(tensor.get_shape())
                    integers += [name] * (tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged safetensors file ({_first_line(error)})") from error
    kinds = {
        "missing": sorted(set(parameters) - set(shapes)),
        "unexpected": sorted(set(where) - set(parameters)),
        "misshapen": [n for n in shapes if n in parameters and shapes[n] != tuple(parameters[n].shape)],
        "quantised or not of floats": integers,
    }
    problems = [f"{len(names)} {kind} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
                for kind, names in kinds.items() if names]  # fmt: skip
    if problems:
        raise UserError(f"{model_dir}: the weights do not fit config.json: {', '.join(problems)}")


def tensor_files(model_dir):
    """{tensor name: path} of model.safetensors.index.json or model.safetensors. UserError if there is neither."""
    folder = Path(model_dir)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(f, str) and Path(f).name == f for f in names.values()):
            raise UserError(f"{index}: weight_map must map tensor names to file names of the same folder")
        if missing := sorted({file for file in names.values() if not (folder / file).is_file()}):
            raise UserError(f"{index}: names files that are missing: {', '.join(missing)}")
        return {name: folder / file for name, file in names.items()}
    try:
        with safe_open(single, "pt") as file:
            return {name: single for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{single}: no usable weights ({_first_line(error)})") from error


def save_weights(tensors, folder, max_shard_bytes=4 * 2**30):
    """Writes (name, tensor) pairs as model.safetensors, or as numbered shards with an index when they exceed the limit.

    `tensors` may be a generator: at most one shard is held in memory.
    """
    folder, shards, shard, size = Path(folder), [], {}, 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            shards.append(_write_shard(folder, len(shards), shard))
            shard, size = {}, 0
        shard[name], size = tensor.contiguous(), size + tensor.nbytes
    if not shards:
        _write(shard, folder / "model.safetensors")
        return
    shards.append(_write_shard(folder, len(shards), shard))
    weight_map, total = {}, 0
    for i, (names, nbytes) in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
        total += nbytes
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_shard(folder, number, shard):
    _write(shard, folder / f"shard-{number}.safetensors")
    return list(shard), sum(tensor.nbytes for tensor in shard.values())


def _write(tensors, path):
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it to its owner alone
