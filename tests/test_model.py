"""model.py against transformers' Qwen3ForCausalLM, and its checkpoints against transformers' loader.

Together these tests prove: the forward pass is Qwen3's (published shapes and odd ones, tied and untied head), what lies
beside a sequence in a packed row changes neither its values nor its gradients, a config.json is either understood or
refused, and a checkpoint is read completely or not at all and is written so that transformers loads the same bits.
The other tests may then take this model as given.

Tolerances: fp32 has 24 bits, so values of size 10 that went through two layers in another order of summation agree to
1e-5; the published shapes, with sums of up to 12,288 terms, to 1e-4 (design.md 4.1).
"""

import gc
import itertools
import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from workers_common import config_of

import fsdp_utils
import model as model_file
from console import UserError
from model import PackedAttention, Qwen3, Qwen3Config, load_weights, read_json, save_weights
from rollout import generate

fsdp_utils.reproducible_matmul()  # at import, that is before any test file has multiplied anything

# What the published config.json files say of the shape; compared with the files themselves where those are at hand.
PUBLISHED = {
    "0.6b": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    "8b": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
}  # fmt: skip
COMMON = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6,
          "max_position_embeddings": 40960, "rope_theta": 1000000, "rope_scaling": None, "attention_bias": False,
          "sliding_window": None, "use_sliding_window": False, "torch_dtype": "bfloat16"}  # fmt: skip
# head_dim is not hidden_size / heads (8), nothing is a power of two but the grouping
SMALL = {**COMMON, "vocab_size": 101, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "tie_word_embeddings": False}  # fmt: skip


@pytest.fixture(autouse=True)
def threads(request):
    """One thread where the model is small: on a machine with other work, a second one made 64 tokens take 8 s, not 0.1."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if "published" in request.fixturenames else 1)
    yield
    torch.set_num_threads(threads)


@torch.no_grad()
def random_model(config, scale=0.2, seed=0, **options):
    """Weights of standard deviation `scale`, far from the flat logits of an untrained model, and norms that are not 1."""
    model = Qwen3(config, **options)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0.0, scale, generator=generator)
        if parameter.dim() == 1:  # a norm
            parameter.add_(1.0)
    return model


def reference_of(model, folder):
    """transformers' model of folder/config.json that shares the weights of `model`: strict, so names and shapes agree."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
    with torch.device("meta"):  # no memory and no time for weights that are replaced at once
        reference = transformers.Qwen3ForCausalLM(config)
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    reference.load_state_dict(weights, strict=True, assign=True)
    reference.model.rotary_emb = Qwen3RotaryEmbedding(config)  # its table is no weight, and was on meta
    return reference.eval()


def prompts_of(lengths, vocab_size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator) for n in lengths]


def packed(sequences):
    """(tokens, positions, attend) of sequences that lie in one row."""
    cu_seqlens = list(itertools.accumulate(map(len, sequences), initial=0))
    return torch.cat(sequences), torch.cat([torch.arange(len(s)) for s in sequences]), PackedAttention(cu_seqlens)


def assert_same_logits(model, reference, lengths, tolerance):
    sequences = prompts_of(lengths, model.config.vocab_size)
    with torch.no_grad():
        ours = model.logits(model(*packed(sequences))).split(list(lengths))
        for sequence, logits in zip(sequences, ours):
            theirs = reference(input_ids=sequence[None]).logits[0]
            assert theirs.std() > 1, "flat logits would hide differences"
            assert logits.dtype == torch.float32
            assert (logits - theirs).abs().max() <= tolerance, f"length {len(sequence)}"


def greedy_reference(reference, prompt, count):
    """What transformers' generate makes of one prompt, without a stop token."""
    row = reference.generate(prompt[None], max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
                             attention_mask=torch.ones(1, len(prompt), dtype=torch.long))  # fmt: skip
    return row[0, len(prompt) :].tolist()


# The published shapes


def test_published_shapes_are_those_of_the_config_files(shared):
    for name, shape in PUBLISHED.items():
        raw = json.loads((shared / "qwen3" / name / "config.json").read_text())
        assert {key: raw[key] for key in (*shape, *COMMON)} == {**COMMON, **shape}
        config = Qwen3Config.from_json(shared / "qwen3" / name / "config.json")
        assert vars(config) == {**shape, "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
                                "initializer_range": 0.02}  # fmt: skip


@pytest.fixture(scope="module", params=["0.6b-tied", "8b-untied"])
def published(request, tmp_path_factory):
    """(model, transformers' model) of a published width with 2 layers, on the same memory: 0.7 and 1.8 GB."""
    folder = tmp_path_factory.mktemp(request.param)
    shape = {**COMMON, **PUBLISHED[request.param.split("-")[0]], "num_hidden_layers": 2}
    shape["vocab_size"] = 151936 if shape["tie_word_embeddings"] else 8192
    model = random_model(config_of(shape, folder), scale=3 * shape["hidden_size"] ** -0.5)
    yield model, reference_of(model, folder)
    del model
    gc.collect()


def test_published_shapes_give_the_logits_of_transformers(published):
    assert_same_logits(*published, lengths=(1, 6, 33, 150), tolerance=1e-4)


def test_published_shapes_give_the_greedy_tokens_of_transformers(published):
    """64 greedy tokens from three prompts in one batch. For all of them one transformers forward over prompt and
    completion has each next token as its argmax, which by induction is greedy decoding for a fraction of the time; at
    the smaller width transformers' own generate runs as well."""
    model, reference = published
    prompts = prompts_of((9, 1, 24), model.config.vocab_size)
    rollouts = generate(model, [p.tolist() for p in prompts], [[0]] * 3, max_new_tokens=64, max_length=1000,
                        temperature=0, stop_ids=(), valid_vocab=model.config.vocab_size)  # fmt: skip
    with torch.no_grad():
        if model.config.hidden_size == 1024:
            assert rollouts[0].completion == greedy_reference(reference, prompts[0], 64)
        for rollout in rollouts:
            assert len(rollout.completion) == 64 and len(set(rollout.completion)) > 8, "a loop would compare nothing"
            row = torch.tensor(rollout.prompt + rollout.completion[:-1])[None]
            logits = reference(input_ids=row, logits_to_keep=64).logits[0]
            assert rollout.completion == logits.argmax(-1).tolist()
            gap = (logits.log_softmax(-1).max(-1).values - torch.tensor(rollout.logprobs)).abs().max()
            assert gap <= 1e-4


# Small shapes, every kind


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(6, 2, 20), (4, 4, 12), (5, 1, 32)])
def test_any_shape_gives_logits_and_greedy_tokens_of_transformers(tmp_path, tied, heads, kv_heads, head_dim):
    """fp32 noise over three small layers is below 1e-5 per logit of size 10; 5e-5 leaves room for another machine."""
    raw = {**SMALL, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
           "tie_word_embeddings": tied}  # fmt: skip
    model = random_model(config_of(raw, tmp_path))
    reference = reference_of(model, tmp_path)
    assert_same_logits(model, reference, lengths=(1, 2, 17, 130), tolerance=5e-5)
    assert ("lm_head.weight" in model.state_dict()) is (not tied)
    prompts = prompts_of((8, 3), 101)
    rollouts = generate(model, [p.tolist() for p in prompts], [[0]] * 2, max_new_tokens=64, max_length=1000,
                        temperature=0, stop_ids=(), valid_vocab=101)  # fmt: skip
    assert [r.completion for r in rollouts] == [greedy_reference(reference, p, 64) for p in prompts]


def test_positions_far_from_zero(tmp_path):
    """Position 40,000 in fp32: the angles of both implementations come from the same products, or this fails."""
    model = random_model(config_of(SMALL, tmp_path))
    tokens, positions = prompts_of((40,), 101)[0], torch.arange(40000, 40040)
    with torch.no_grad():
        ours = model.logits(model(tokens, positions, PackedAttention([0, 40])))
        theirs = reference_of(model, tmp_path)(input_ids=tokens[None], position_ids=positions[None]).logits[0]
    assert (ours - theirs).abs().max() <= 5e-5


@pytest.mark.parametrize("tied", [True, False])
def test_config_written_by_transformers_is_understood(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    shape = {k: v for k, v in SMALL.items() if k not in COMMON} | {"tie_word_embeddings": tied}
    transformers.Qwen3Config(**shape, rope_theta=5000.0, rms_norm_eps=1e-5).save_pretrained(tmp_path)
    config = Qwen3Config.from_json(tmp_path / "config.json")
    assert {key: getattr(config, key) for key in shape} == shape
    written = json.loads((tmp_path / "config.json").read_text())
    assert config.rope_theta == (written.get("rope_theta") or written["rope_parameters"]["rope_theta"])
    assert config.rms_norm_eps == 1e-5


# Packed rows and activation checkpointing


def gradients_of(model, sequences, weights):
    """Hidden states and gradients of sum(weights * hidden), all sequences in one row."""
    model.zero_grad()
    hidden = model(*packed(sequences))
    (hidden * torch.cat(weights)).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_packed_row_is_separate_rows_in_values_and_gradients(tmp_path):
    """Hidden states have size 1 and agree to 1e-5; gradients to 1e-5 of the largest of their tensor (sums of 50 terms
    in another order). Packing without boundaries must differ by far more, or the test would not see a leak."""
    model = random_model(config_of(SMALL, tmp_path))
    sequences = prompts_of((1, 17, 3, 29), 101)
    weights = [torch.randn(len(s), 48, generator=torch.Generator().manual_seed(len(s))) for s in sequences]
    row, row_grads = gradients_of(model, sequences, weights)
    alone = [gradients_of(model, [s], [w]) for s, w in zip(sequences, weights)]
    assert (row - torch.cat([hidden for hidden, _ in alone])).abs().max() <= 1e-5
    for name, grad in row_grads.items():
        total = sum(grads[name] for _, grads in alone)
        assert (grad - total).abs().max() <= 1e-5 * total.abs().max(), name
    with torch.no_grad():
        tokens, positions, _ = packed(sequences)
        leaky = model(tokens, positions, PackedAttention([0, len(tokens)]))
    assert (leaky - row)[1:].abs().mean() > 0.05


def test_activation_checkpointing_changes_memory_only(tmp_path):
    """The layers run twice (so the switch is wired) and every gradient is the same to the last bit or nearly."""
    config = config_of(SMALL, tmp_path)
    sequences = prompts_of((11, 30), 101)
    weights = [torch.randn(len(s), 48, generator=torch.Generator().manual_seed(len(s))) for s in sequences]
    results, forwards = [], []
    for on in (False, True):
        model = random_model(config, activation_checkpointing=on)
        calls = []
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        results.append(gradients_of(model, sequences, weights)[1])
        forwards.append(len(calls))
    assert forwards == [3, 6]
    plain, checkpointed = results
    assert plain.keys() == checkpointed.keys() and len(plain) == len(list(model.parameters())) - 1  # the head is unused
    for name, grad in plain.items():
        assert (grad - checkpointed[name]).abs().max() <= 1e-6 * grad.abs().max(), name


def test_logits_of_a_16_bit_model_are_fp32(tmp_path):
    """Rounding logits to bf16 would leave 3 digits: the sampler's log-probs would be off by up to 0.03."""
    model = random_model(config_of(SMALL, tmp_path)).bfloat16()
    hidden = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = model.logits(hidden)
    exact = hidden.double() @ model.lm_head.weight.double().T
    assert logits.dtype == torch.float32 and (logits - exact).abs().max() <= 1e-5
    assert (logits.bfloat16() - exact).abs().max() > 1e-3


def test_init_weights_is_a_function_of_the_seed(tmp_path):
    config = config_of({**SMALL, "initializer_range": 0.05}, tmp_path)
    first, again, other = (Qwen3(config).init_weights(seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name, tensor in first.items():
        if name.endswith("norm.weight"):
            assert (tensor == 1).all()
        else:
            assert not torch.equal(tensor, other[name])
            assert abs(tensor.std() / 0.05 - 1) < 6 / (2 * tensor.numel()) ** 0.5, name  # six standard errors


# config.json


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    {"rope_theta": 5e5, "rope_scaling": None, "dtype": "bfloat16"},
    {"rope_theta": 5e5, "rope_scaling": {"type": "default"}, "torch_dtype": "float32"},
    {"rope_theta": 500000, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2},
])  # fmt: skip
def test_config_in_every_spelling(tmp_path, spelling):
    raw = {k: v for k, v in SMALL.items() if k not in ("rope_theta", "torch_dtype")}
    config = config_of({**raw, **spelling}, tmp_path)
    assert config.rope_theta == 5e5 and type(config.rope_theta) is float
    assert config == config_of({**SMALL, "rope_theta": 5e5}, tmp_path)


@pytest.mark.parametrize("change, named", [
    ({"model_type": "qwen2"}, "qwen2"),
    ({"model_type": "qwen3_moe"}, "qwen3_moe"),
    ({"model_type": None}, "model_type"),
    ({"attention_bias": True}, "attention_bias"),
    ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
    ({"rope_scaling": "yarn"}, "rope_type"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "rope_type"),
    ({"rope_theta": None}, "rope_theta"),
    ({"rope_theta": "1e6"}, "rope_theta"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"head_dim": None}, "head_dim"),
    ({"head_dim": 21}, "head_dim"),
    ({"num_key_value_heads": 4}, "multiple"),
    ({"num_key_value_heads": 0}, "num_key_value_heads"),
    ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"hidden_size": -48}, "hidden_size"),
    ({"hidden_size": float("inf")}, "hidden_size"),
    ({"vocab_size": [101]}, "vocab_size"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
])  # fmt: skip
def test_config_that_is_not_run_is_refused(tmp_path, change, named):
    with pytest.raises(UserError) as caught:
        config_of({**SMALL, **change}, tmp_path)
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"null", b"\xff{}", b'{"a": ' + b"[" * 200000])
def test_json_that_cannot_be_read_is_one_line(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_json(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


# Reading weights


@pytest.fixture
def checkpoint(tmp_path):
    """(folder, model): a small untied checkpoint in one file."""
    folder = tmp_path / "checkpoint"
    model = random_model(config_of(SMALL, folder))
    save_weights(model.state_dict().items(), folder)
    return folder, model


def fresh(folder):
    return Qwen3(Qwen3Config.from_json(folder / "config.json")).init_weights(9)


def assert_refused(folder, *named):
    """load_weights raises one line that names all of `named`, and has written nothing."""
    model = fresh(folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_weights(model, folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000 and all(part in message for part in named), message
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def rewrite(folder, change):
    """Changes the dict of a folder's model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_load_gives_back_what_was_saved_in_any_dtype(checkpoint):
    folder, model = checkpoint
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        loaded = fresh(folder).to(dtype)
        load_weights(loaded, folder)
        for name, tensor in loaded.state_dict().items():
            assert tensor.dtype == dtype and torch.equal(tensor, model.state_dict()[name].to(dtype)), name


def test_missing_unexpected_and_misshapen_tensors_are_all_named(checkpoint):
    folder, _ = checkpoint

    def spoil(tensors):
        del tensors["model.layers.1.self_attn.q_norm.weight"]
        tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(120)
        tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"].T.contiguous()

    rewrite(folder, spoil)
    assert_refused(folder, str(folder), "1 missing (model.layers.1.self_attn.q_norm.weight)", "1 unexpected",
                   "model.layers.1.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight")  # fmt: skip


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_one_missing_tensor_is_enough(checkpoint, name):
    folder, _ = checkpoint
    rewrite(folder, lambda tensors: tensors.pop(name))
    assert_refused(folder, "1 missing", name)


def test_more_layers_than_the_config_says(checkpoint):
    folder, _ = checkpoint
    (folder / "config.json").write_text(json.dumps({**SMALL, "num_hidden_layers": 2}))
    assert_refused(folder, "11 unexpected")


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_truncated_file(checkpoint, keep):
    folder, _ = checkpoint
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(keep * len(raw)) if isinstance(keep, float) else keep])
    assert_refused(folder, str(path))


def test_file_of_something_else(checkpoint):
    folder, _ = checkpoint
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    assert_refused(folder, "model.safetensors")


def test_missing_folder_and_missing_weights(tmp_path, checkpoint):
    folder, _ = checkpoint
    with pytest.raises(UserError, match="nowhere"):
        Qwen3Config.from_json(tmp_path / "nowhere" / "config.json")
    with pytest.raises(UserError, match="nowhere"):
        load_weights(fresh(folder), tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    assert_refused(folder, "model.safetensors")


@pytest.mark.parametrize("index", [
    b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"model.norm.weight": 1}}',
    b'{"weight_map": {"model.norm.weight": "../model.safetensors"}}', b'{"weight_map": {}}',
    b'{"weight_map": {"model.norm.weight": ""}}', b'{"weight_map": {"model.norm.weight": ".."}}',
    b'{"weight_map": {"model.norm.weight": "absent.safetensors"}}',
])  # fmt: skip
def test_bad_index(checkpoint, index):
    folder, _ = checkpoint
    (folder / "model.safetensors.index.json").write_bytes(index)
    assert_refused(folder)


def test_index_that_promises_more_than_the_file_holds(checkpoint):
    folder, model = checkpoint
    names = dict.fromkeys(model.state_dict(), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    load_weights(fresh(folder), folder)  # complete: fine
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    assert_refused(folder, "1 missing", "model.norm.weight")


def test_tied_head_written_twice_is_accepted(tmp_path):
    """Some exporters write lm_head.weight of a tied model as well; ours must not (converters choke on it)."""
    model = random_model(config_of({**SMALL, "tie_word_embeddings": True}, tmp_path))
    save_weights(model.named_parameters(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    loaded = fresh(tmp_path)
    load_weights(loaded, tmp_path)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


# Writing weights


@pytest.mark.parametrize("tied", [True, False])
def test_shards_round_trip_with_an_index_of_what_was_written(tmp_path, tied):
    model = random_model(config_of({**SMALL, "tie_word_embeddings": tied}, tmp_path))
    save_weights(((name, p.detach()) for name, p in model.named_parameters()), tmp_path, max_shard_bytes=40000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    held = {name: file for file in files for name in load_file(tmp_path / file)}
    assert held == index["weight_map"] and held.keys() == dict(model.named_parameters()).keys()
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in model.parameters())
    assert all(sum(t.nbytes for t in load_file(tmp_path / file).values()) <= 40000 for file in files)
    loaded = fresh(tmp_path)
    load_weights(loaded, tmp_path)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_saving_holds_one_shard_at_a_time(tmp_path):
    """An 8B model has 16 GB in bf16: a generator of its tensors must not be collected before it is written."""
    alive, most = set(), 0

    def tensors():
        nonlocal most
        for i in range(20):
            tensor = torch.full((100,), float(i))
            alive.add(i)
            weakref.finalize(tensor, alive.discard, i)
            most = max(most, len(alive))
            yield f"tensor.{i}", tensor

    save_weights(tensors(), tmp_path, max_shard_bytes=1200)
    assert len(list(tmp_path.glob("model-*-of-00007.safetensors"))) == 7
    assert most <= 5, "three of a shard, the one that did not fit, and the one being made"


def test_model_file_knows_nothing_of_processes_or_sampling():
    source = open(model_file.__file__, encoding="utf-8").read()
    assert "torch.distributed" not in source and "import rollout" not in source and "from rollout" not in source
