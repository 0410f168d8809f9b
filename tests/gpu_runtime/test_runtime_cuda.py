"""On CUDA the runtime computes what it computes on a CPU, in each precision, eagerly and from captured graphs."""

from contextlib import closing

import msgspec
import pytest
import torch
from runtime_small import SMALL, Runner, Warm
from runtime_variants import VARIANTS, policy_of

from gpu_runtime.kv.copy_engine import CopyEngine
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.kv.token_rows import TokenRows, token_places
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.capture_sizes import capture_sizes, piece_sizes
from gpu_runtime.model.config import Experts
from gpu_runtime.model.decode_graph import CudaCapture, DecodeGraph
from gpu_runtime.model.decoder import Decoder, DecoderLayer
from gpu_runtime.model.flashinfer_kernels import build_kernels
from gpu_runtime.model.fp8 import CAPABILITY, Fp8Matrix
from gpu_runtime.model.rotary import RotaryEmbedding
from gpu_runtime.model.weights import EndWeights, LayerWeights
from kvtwin.testing import live, requests
from kvtwin.testing.live import ROWS, small_decoder, tight_limits
from sim.engine.changes import Direction

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# Of logits, whose standard deviation is one.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}
CONFIGS = {
    "mha": msgspec.structs.replace(SMALL, num_kv_heads=6),
    "gqa": msgspec.structs.replace(SMALL, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=64, qk_norm=True),
    "windows": msgspec.structs.replace(
        SMALL, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=64, windows=(9, None, 9, None)
    ),
    # All are chosen: in 16 bits a router might rank others first.
    "experts": msgspec.structs.replace(SMALL, experts=Experts(3, 3, 40, renormalised=True, named_as_mixtral=False)),
    "odd": msgspec.structs.replace(SMALL, num_heads=7, num_kv_heads=1, head_dim=24, qkv_bias=True),
}
STEPS = [{0: range(40), 1: range(3)}, {1: [7], 0: range(50, 99), 2: range(5)}, {0: [1], 1: [2], 2: [3]}, {2: range(33)}]


def moved(weights, device, dtype):
    values = {name: getattr(weights, name) for name in weights.__dataclass_fields__}
    return type(weights)(**{n: None if v is None else v.to(device, dtype) for n, v in values.items()})


@pytest.fixture(scope="module", params=CONFIGS)
def on_cpu(request):
    return CONFIGS[request.param], Decoder.random(CONFIGS[request.param], device="cpu", dtype=torch.float32, seed=3)


def on_cuda(config, decoder, dtype) -> Decoder:
    layers: list[LayerWeights] = [moved(layer.weights, "cuda", dtype) for layer in decoder.layers]
    ends: EndWeights = moved(decoder.ends, "cuda", dtype)
    return Decoder(config, layers, ends)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layer_group", [1, 4])
def test_logits_are_those_of_the_cpu(on_cpu, dtype, layer_group):
    reference = Runner(on_cpu[1], layer_group)
    runner = Runner(on_cuda(*on_cpu, dtype), layer_group, block_tokens=16)
    for step in STEPS:
        new = {seq: list(tokens) for seq, tokens in step.items()}
        expected, logits = reference.step(new), runner.step(new)
        for seq in new:
            torch.testing.assert_close(logits[seq].float().cpu(), expected[seq], atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_graphs_give_the_logits_of_eager_decodes(on_cpu, dtype, by_layer):
    decoder = on_cuda(*on_cpu, dtype)
    runner = Runner(decoder, layer_group=2)
    capture = CudaCapture(decoder.device)
    graph = DecodeGraph(decoder, runner.pool, [1, 2, 4], max_blocks=30, by_layer=by_layer, capture=capture)
    runner.step({0: list(range(60)), 1: [5], 2: list(range(17))})
    for new in ({0: [1], 1: [2], 2: [3]}, {1: [9]}, {2: [4], 0: [8]}):
        decodes = runner.decodes(new)
        rows = [runner.tables[seq] for seq in new]
        tables = [[row[group] for row in rows] for group in range(runner.pool.num_groups)]
        context = [length - 1 for length in decodes[1]]
        batch = AttentionBatch.build([1] * len(new), context, tables, runner.pool.block_tokens, "cuda")
        ids = torch.tensor(decodes[0], device="cuda")
        free = runner.pool.data.clone()
        logits, likeliest = graph.run(*decodes)
        assert likeliest.equal(logits.argmax(dim=-1))
        logits = logits.clone()
        written = runner.pool.data.clone()
        runner.pool.data.copy_(free)
        expected = decoder.forward(ids, batch, runner.pool)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE[dtype], rtol=0)
        torch.testing.assert_close(written, runner.pool.data, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_products_are_those_of_a_cpu(rows, dtype):
    if torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("no FP8 on this GPU")
    held, hidden = Fp8Matrix.of(torch.randn(256, 64)), torch.randn(rows, 64).to(dtype)
    there = Fp8Matrix(held.data.cuda(), held.scales.cuda())
    # torch sums in another order, and rounds to 16 bits.
    torch.testing.assert_close(there.product(hidden.cuda()).cpu(), held.product(hidden), atol=0.1, rtol=2e-2)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flashinfer_gives_the_logits_of_our_kernels(dtype, kv_dtype):
    """Prompts, chunks and decodes eagerly, then decodes from graphs, padded and not."""
    pytest.importorskip("flashinfer")
    config, device = CONFIGS["gqa"], torch.device("cuda")
    both = [Decoder.random(config, device=device, dtype=dtype, seed=3) for _ in range(2)]
    both[1].compute_with(build_kernels("flashinfer", config.num_heads, dtype, device))
    ours, theirs = (Runner(decoder, config.num_layers, block_tokens=16, kv_dtype=kv_dtype) for decoder in both)
    graphs = [
        DecodeGraph(runner.decoder, runner.pool, [1, 2, 4], max_blocks=30, capture=CudaCapture(device))
        for runner in (ours, theirs)
    ]
    for step in STEPS:
        new = {seq: list(tokens) for seq, tokens in step.items()}
        expected, logits = ours.step(new), theirs.step(new)
        for seq in new:
            torch.testing.assert_close(logits[seq], expected[seq], atol=TOLERANCE[dtype], rtol=0)
    for new in ({0: [1], 1: [2], 2: [3]}, {1: [9]}, {2: [4], 0: [8]}):
        expected, logits = (
            graph.run(*runner.decodes(new)).logits for graph, runner in zip(graphs, (ours, theirs), strict=True)
        )
        torch.testing.assert_close(logits, expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("gpu", [16, 60])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_device_with_graphs_gives_the_tokens_of_one_without(variant, gpu, monkeypatch):
    """And of the CPU: with a small pool layers stream in ahead of the computation, on streams of their own."""
    decoder = on_cuda(SMALL, small_decoder(), torch.float32)
    policy, arrivals = policy_of(variant), requests(*ROWS)
    replayed = []
    run = DecodeGraph.run

    def counted(self, tokens, *rest, **between):
        replayed.append(len(tokens))
        return run(self, tokens, *rest, **between)

    monkeypatch.setattr(DecodeGraph, "run", counted)
    for graphs in ((), capture_sizes(6)):
        pieces = piece_sizes(6, 64) if graphs else ()
        served = live.serve(
            policy, arrivals, tight_limits(policy, gpu=gpu), decoder=decoder, kind=Warm, device="cuda",
            graph_batch_sizes=graphs, piece_sizes=pieces,
        )  # fmt: skip
        assert len(live.check_tokens(served, arrivals)) == len(ROWS)
        assert bool(replayed) == bool(graphs)


@pytest.mark.parametrize("scattered", [(), ("gpu",), ("gpu", "host")])
def test_blocks_survive_a_trip_to_the_host_beside_computation(scattered):
    gpu = KVPool(SMALL, 300, 16, 1, "cuda", torch.float16)
    host = KVPool(SMALL, 300, 16, 1, "cpu", torch.float16, pin=True)
    gpu.data.normal_()
    before = gpu.data.clone()
    ids = torch.randperm(300).tolist() if "gpu" in scattered else list(range(300))
    there = torch.randperm(300).tolist() if "host" in scattered else list(range(300))
    with closing(CopyEngine("cuda")) as engine:
        out = engine.copy_blocks(gpu, ids, host, there, Direction.D2H)
        torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda")
        out.wait()
        assert torch.equal(host.data[there], before[ids].cpu())
        gpu.data.zero_()
        back = engine.copy_blocks(host, there, gpu, ids, Direction.H2D)
        back.wait_in_stream()
        assert torch.equal(gpu.data, before)
        back.wait()
        assert back.done()


def test_hidden_states_come_back_from_the_host():
    hidden = torch.randn(37, SMALL.hidden_size, device="cuda", dtype=torch.bfloat16)
    with closing(CopyEngine("cuda")) as engine:
        rows = TokenRows(engine, 8, SMALL.num_layers, 16, SMALL.hidden_size, torch.bfloat16)
        assert rows.data.is_pinned()
        places = token_places([3, 0, 5], 0, 37, 16)
        rows.save(1, hidden[:20], range(20), places[:20]).wait()
        rows.save(1, hidden, range(20, 37), places[20:]).wait()
        loaded, handle = rows.load(1, places)
        handle.wait_in_stream()
        assert torch.equal(loaded, hidden)


def test_true_shapes_of_a_large_model_run_in_half_precision():
    config = msgspec.structs.replace(
        SMALL, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128, intermediate_size=28672, num_layers=80
    )
    decoder = Decoder.random(config, device="cuda", dtype=torch.float16, seed=0, num_layers=1)
    layer: DecoderLayer = decoder.layers[0]
    assert isinstance(layer._rotary, RotaryEmbedding)
    runner = Runner(decoder, num_blocks=64, block_tokens=16)
    hidden = torch.randn(300, 8192, device="cuda", dtype=torch.float16)
    for new in ({0: list(range(300))}, {0: list(range(200))}, {0: [1]}):
        out = layer.forward(hidden[: len(new[0])], runner.batch(new), runner.pool, 0)
        assert out.isfinite().all() and 0.5 < out.float().std() < 2.0
