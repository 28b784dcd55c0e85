"""Token log-probs, chunked against whole, and against the model's own logits."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modules.algorithms.cold_start_kd import ColdStartKD, kd_columns
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.batch import collate
from lightning_modules.maths.divergences import forward_kl, make_divergence, reverse_kl
from lightning_modules.models import projection
from lightning_modules.models.policy import ValueModel, load_causal_lm, named_weights, token_logprobs
from lightning_modules.models.projection import LMHead, TokenStatistics
from tests.lightning_modules.helpers import VOCABULARY, make_trajectories


@pytest.fixture(scope="module")
def model(model_dir):
    return load_causal_lm(str(model_dir))


@pytest.fixture(scope="module")
def batch():
    return collate(make_trajectories(5))


def test_against_the_models_own_logits(model, batch):
    equals_own_logits(model, batch)


def equals_own_logits(model, batch):
    stats = token_logprobs(model, batch, chunk=4, temperature=0.7)
    for i, length in enumerate(batch.lengths.tolist()):
        ids = batch.input_ids[i : i + 1, :length]  # alone, without padding
        logprobs = (model(input_ids=ids).logits[0].float() / 0.7).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        for t in range(1, length):
            on = batch.mask[i, t].item()
            assert stats.logprobs[i, t].item() == pytest.approx(on * logprobs[t - 1, ids[0, t]].item(), abs=1e-4)
            assert stats.entropy[i, t].item() == pytest.approx(on * entropy[t - 1].item(), abs=1e-4)
        assert stats.logprobs[i, length:].abs().sum() == 0


@pytest.mark.parametrize("name", ["final_logit_softcapping", "lm_head_multiplier"])
def test_logits_that_are_bent_after_the_output_matrix_are_refused(name, model_dir, tmp_path):
    """Also where the option is nested in the configuration of a model that reads images, and before weights load."""
    from transformers import FalconH1Config, Gemma4Config

    made = {
        "final_logit_softcapping": lambda: Gemma4Config(text_config={"final_logit_softcapping": 5.0}),
        "lm_head_multiplier": lambda: FalconH1Config(lm_head_multiplier=0.1),
    }
    made[name]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"sets {name}, which the chunked log-probs do not apply"):
        load_causal_lm(str(tmp_path))
    with pytest.raises(ValueError, match=f"the model at '{tmp_path}' sets {name}"):
        GRPO(str(tmp_path)).check_data(None)
    with pytest.raises(ValueError, match=f"the model at '{tmp_path}' sets {name}"):
        ColdStartKD(str(model_dir), str(tmp_path)).accept_data(None)


def test_a_model_of_the_shape_of_qwen35(batch, tmp_path):
    """Three layers of four carry a state along the row instead of attention: padding behind the row must not matter."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "head_dim": 16}
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    config = Qwen3_5TextConfig(
        **shape, **heads, linear_value_head_dim=16, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2
    )
    Qwen3_5ForCausalLM(config).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path))
    assert "linear_attention" in model.config.layer_types
    equals_own_logits(model, batch)
    token_logprobs(model, batch, chunk=7).logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("chunk", [7])
def test_chunked_equals_whole_with_gradient(model, batch, chunk):
    results = []
    for size in (chunk, 10_000):
        model.zero_grad()
        stats = token_logprobs(model, batch, chunk=size)
        weights = torch.linspace(-1, 1, stats.logprobs.numel()).view_as(stats.logprobs)
        ((stats.logprobs * weights).sum() + (stats.entropy * weights.flip(0)).sum()).backward()
        results.append([stats.logprobs, stats.entropy, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_distillation_columns_chunked_equal_whole_and_cut_the_vocabulary():
    """The teacher has three more output rows than the student; they must not take part in the softmax."""
    torch.manual_seed(0)
    student, teacher = LMHead(4, 10, bias=False), torch.nn.Linear(6, 13, bias=False)
    hidden, teacher_hidden = torch.randn(9, 4, requires_grad=True), torch.randn(9, 6)
    targets = torch.arange(9)

    def run(chunk, divergence):
        def function(logits, y, h):
            return kd_columns(logits, y, h, teacher, divergence, temperature=2.0)

        columns = student(hidden, function=function, rows=(targets, teacher_hidden), chunk=chunk)
        return columns, torch.autograd.grad(columns[:, :2].sum(), (hidden, student.weight))

    for divergence in (forward_kl, make_divergence("jsd")):
        (a, grads_a), (b, grads_b) = run(2, divergence), run(100, divergence)
        assert torch.allclose(a, b, atol=1e-6)
        assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(grads_a, grads_b, strict=True))
    p = (hidden @ student.weight.T / 2.0).softmax(-1)
    q = (teacher_hidden @ teacher.weight[:10].T / 2.0).softmax(-1)
    assert torch.allclose(b[:, 2], (q * (q / p).log()).sum(-1), atol=1e-5)
    columns, _ = run(3, reverse_kl)
    assert torch.allclose(columns[:, 1], (p * (p / q).log()).sum(-1), atol=1e-5)
    assert torch.allclose(columns[:, 2], b[:, 2], atol=1e-6)  # the logged KL is the forward one, whatever is learnt


def test_a_teacher_of_another_16_bit_type_than_autocast_is_read():
    """Its body then ends in float32, because a bfloat16 stream and float16 products are promoted."""
    torch.manual_seed(0)
    logits, hidden, head = torch.randn(9, 13), torch.randn(9, 6), torch.nn.Linear(6, 13, bias=False)
    expected = kd_columns(logits, torch.arange(9), hidden, head, forward_kl, temperature=1.0)
    found = kd_columns(logits, torch.arange(9), hidden, head.bfloat16(), forward_kl, temperature=1.0)
    assert torch.allclose(found, expected, atol=0.05) and not torch.equal(found, expected)


def test_no_tokens_still_reach_every_parameter(model, batch):
    model.zero_grad()
    stats = token_logprobs(model, batch.rows([], 1))
    (stats.logprobs.sum() + stats.entropy.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in model.parameters())


class Operations(TorchDispatchMode):
    """Counts operations by name, and remembers the storages of results with ``size`` elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.names, self.storages = size, Counter(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.names[func.overloadpacket.__name__] += 1
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() == self.size:
                self.storages[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that none is given out again
        return out


def plain_statistics(hidden, weight, bias, targets, temperature):
    """Log-probs, entropies and accuracy in float64, all logits at once."""
    logprobs = (torch.nn.functional.linear(hidden, weight, bias).double() / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    return torch.stack([chosen, -(logprobs.exp() * logprobs).sum(-1), (chosen == logprobs.amax(-1)).double()], -1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_statistics_and_their_gradients_against_float64(monkeypatch, dtype, tolerance, temperature):
    """With a gradient of each column, of both, and a second backward pass, for which nothing is kept any more."""
    monkeypatch.setitem(projection.BLOCK, "cpu", 2 * 50)  # two rows at once
    torch.manual_seed(0)
    head = LMHead(8, 50, bias=True).to(dtype)
    hidden, targets = (4 * torch.randn(9, 8)).to(dtype).requires_grad_(), torch.randint(50, (9,))
    targets[0] = (hidden[0] @ head.weight.T + head.bias).argmax()
    found = head(hidden, TokenStatistics(temperature, entropy=True, accuracy=True), (targets,), chunk=4)
    inputs = (hidden, head.weight, head.bias)
    exact = plain_statistics(*(x.double() for x in inputs), targets, temperature)
    assert found.dtype == dtype and torch.allclose(found.double(), exact, atol=tolerance)
    upstream = torch.randn(9, 3, dtype=torch.float64)
    for used in ([1, 0, 0], [0, 1, 0], [1, 1, 0]):
        grad = upstream * torch.tensor(used)
        got = torch.autograd.grad(found, inputs, grad.to(dtype), retain_graph=True)
        want = torch.autograd.grad(exact, inputs, grad, retain_graph=True)
        assert all(torch.allclose(a, b, atol=10 * tolerance) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("entropy", [False, True])
def test_statistics_of_several_targets_and_their_gradients_against_float64(monkeypatch, dtype, tolerance, entropy):
    """Log-probs of five tokens at each position, two of them equal; with gradients of some and of all."""
    monkeypatch.setitem(projection.BLOCK, "cpu", 2 * 50)
    torch.manual_seed(0)
    head = LMHead(8, 50, bias=True).to(dtype)
    hidden, targets = (4 * torch.randn(9, 8)).to(dtype).requires_grad_(), torch.randint(50, (9, 5))
    targets[:, 4] = targets[:, 1]
    found = head(hidden, TokenStatistics(0.7, entropy=entropy), (targets,), chunk=4)
    inputs = (hidden, head.weight, head.bias)
    logprobs = (torch.nn.functional.linear(*(x.double() for x in inputs)) / 0.7).log_softmax(-1)
    exact = torch.cat([logprobs.gather(-1, targets), -(logprobs.exp() * logprobs).sum(-1, keepdim=True)], -1)
    exact = exact if entropy else exact[:, :5]
    assert found.dtype == dtype and torch.allclose(found.double(), exact, atol=tolerance)
    upstream = torch.randn(exact.shape, dtype=torch.float64)
    for used in ([1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]):
        grad = upstream * torch.tensor(used)[: exact.shape[1]]
        got = torch.autograd.grad(found, inputs, grad.to(dtype), retain_graph=True)
        want = torch.autograd.grad(exact, inputs, grad, retain_graph=True)
        assert all(torch.allclose(a, b, atol=20 * tolerance) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("targets", [1, 5])
def test_statistics_hold_one_chunk_of_logits_and_keep_the_last(monkeypatch, targets):
    monkeypatch.setitem(projection.BLOCK, "cpu", 50)
    head, hidden = LMHead(8, 50, bias=False), torch.randn(9, 8, requires_grad=True)
    with Operations(4 * 50) as operations:
        head(hidden, TokenStatistics(entropy=True), (torch.arange(9 * targets).view(9, -1),), chunk=4).sum().backward()
    assert len(operations.storages) == 1, "the gradient overwrites the logits, and every chunk those before it"
    assert operations.names["mm"] + operations.names["addmm_"] == 3 + 2 + 2 * 3, (
        "of three chunks, the last is not computed again"
    )


def test_an_entropy_that_is_only_logged_has_no_backward_pass():
    head, hidden = LMHead(8, 50, bias=False), torch.randn(9, 8, requires_grad=True)
    for learnt, times in ((1, 0), (2, 1)):
        columns = head(hidden, TokenStatistics(entropy=True), (torch.arange(9),))
        with Operations(0) as operations:
            columns[:, :learnt].sum().backward()
        assert operations.names["addcmul"] == times
    for entropy in (False, True):
        with Operations(0) as operations, torch.no_grad():
            head(hidden, TokenStatistics(entropy=entropy), (torch.arange(9),))
        assert operations.names["bmm"] == entropy, "nor a forward pass where nobody asks for it"


def test_statistics_of_half_precision_weights_are_float32():
    torch.manual_seed(0)
    head, targets = LMHead(8, 50, bias=False).bfloat16(), torch.arange(9)
    hidden = torch.randn(9, 8, dtype=torch.bfloat16, requires_grad=True)
    columns = head(hidden, TokenStatistics(entropy=True), (targets,), chunk=4)
    exact = plain_statistics(hidden, head.weight, None, targets, 1.0)
    assert columns.dtype == torch.float32 and torch.allclose(columns, exact[:, :2].float(), atol=1e-5)
    upstream = 1e-6 * torch.randn(9, 2)
    got = torch.autograd.grad(columns, (hidden, head.weight), upstream)
    want = torch.autograd.grad(exact[:, :2], (hidden, head.weight), upstream.double())
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16 and (a - b).float().norm() < 0.02 * b.float().norm()


def test_autocast_computes_in_the_lower_precision_and_keeps_float32_gradients():
    torch.manual_seed(0)
    head, hidden = LMHead(8, 20, bias=False), torch.randn(6, 8, requires_grad=True)
    seen = []

    def function(logits, y):
        seen.append(logits.dtype)
        return -torch.nn.functional.cross_entropy(logits.float(), y, reduction="none")[:, None]

    exact = torch.autograd.grad((hidden @ head.weight.T).log_softmax(-1)[range(6), range(6)].sum(), hidden)[0]
    for one in (function, TokenStatistics()):
        with torch.autocast("cpu", torch.float16):
            columns = head(hidden, function=one, rows=(torch.arange(6),), chunk=4)
        hidden_grad, weight_grad = torch.autograd.grad(columns.sum(), (hidden, head.weight))
        assert columns.dtype == hidden_grad.dtype == weight_grad.dtype == torch.float32
        assert torch.allclose(hidden_grad, exact, atol=1e-2)
    assert set(seen) == {torch.float16}


def test_value_model_reads_before_the_token(model_dir, batch):
    critic = ValueModel(str(model_dir))
    assert critic(batch).abs().sum() == 0  # the head starts at zero
    torch.nn.init.ones_(critic.head.weight)
    values = critic(batch)
    changed = batch.input_ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 400
    after = critic(type(batch)(changed, batch.lengths, batch.prompt_lengths, batch.mask, batch.sampler_logprobs))
    assert torch.allclose(values[:, :6], after[:, :6], atol=1e-5)  # V_5 does not know token 5
    assert not torch.allclose(values[:, 6], after[:, 6], atol=1e-3)
    assert values[:, 0].abs().sum() == 0


def test_weights_have_hugging_face_names_and_come_in_buckets(model, model_dir):
    from safetensors.torch import load_file

    stored = load_file(model_dir / "model.safetensors")
    weights = dict(named_weights(model, bucket_elements=500))
    assert weights.keys() == stored.keys() - {"lm_head.weight"}  # tied
    assert all(torch.equal(weights[k], stored[k]) for k in weights)


def test_a_missing_folder_says_so():
    with pytest.raises(FileNotFoundError, match="no model folder at '/nowhere/at/all'"):
        load_causal_lm("/nowhere/at/all")
