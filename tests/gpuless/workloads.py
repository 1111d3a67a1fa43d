"""What jobs do in these tests, as people's jobs do it. Read as text, and run in the rig's Python (`watched.py`)."""

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

held: dict = {}


class Block(nn.Module):  # type: ignore[misc]
    """A layer of a small transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.mix(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.shrink(nn.functional.gelu(self.grow(self.between(x))))


class Transformer(nn.Module):  # type: ignore[misc]
    """Embeds, mixes, predicts."""

    def __init__(self, vocabulary: int = 1000, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def train(steps: int, device: int = 0) -> None:
    """Batches of lengths that vary, mixed precision, AdamW; the model stays."""
    if "model" not in held:
        torch.manual_seed(0)
        held["model"] = Transformer().to(f"cuda:{device}")
        held["optimizer"] = torch.optim.AdamW(held["model"].parameters())
        held["step"] = 0
    model, optimizer = held["model"], held["optimizer"]
    for _ in range(steps):
        held["step"] += 1
        length = 32 + held["step"] * 37 % 200
        tokens = torch.zeros(8, length, dtype=torch.long, device=f"cuda:{device}")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tokens).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=held["step"] % 3 > 0)


def serve(tokens: int) -> None:
    """Caches of keys and values that grow, for requests that come and go."""
    caches = held.setdefault("caches", {})
    for number in range(tokens):
        request = number % 7
        if number % 31 == 30:
            caches.pop(request, None)
        old = caches.get(request)
        new = torch.empty(4, 2, 64, device="cuda")
        caches[request] = new if old is None else torch.cat([old, new], dim=1)


def cross_streams(count: int) -> None:
    """Tensors that another stream still uses when they are let go."""
    other = torch.cuda.Stream()
    for number in range(count):
        tensor = torch.empty((1 << 20) + number * 4096, dtype=torch.uint8, device="cuda")
        tensor.record_stream(other)
        del tensor
    held["stream"] = other


def capture_graph() -> None:
    """A CUDA graph, with a pool of its own that it keeps."""
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros(1 << 18, device="cuda")
    with torch.cuda.graph(graph):
        big = static * 2
        held["kept"] = big + 1
        del big
    held["graph"], held["static"] = graph, static


class Greedy(torch.autograd.Function):  # type: ignore[misc]
    """Runs out of memory going backward, that is in a thread of PyTorch's own."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty(1 << 40, dtype=torch.uint8, device="cuda")


def run_out_backward() -> str:
    """Catch an OutOfMemoryError of a backward pass; its text."""
    x = torch.zeros(4, device="cuda", requires_grad=True)
    try:
        Greedy.apply(x).sum().backward()
    except torch.cuda.OutOfMemoryError as error:
        return str(error)
    return ""


def run_out_in_capture() -> str:
    """Catch one while a CUDA graph is captured; its text. Relaxed, since PyTorch asks the driver then, which ends other captures."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        return str(error)
    return ""


def run_out(size: int = 1 << 40) -> str:
    """Catch an OutOfMemoryError; its text."""
    try:
        torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        return str(error)
    return ""
