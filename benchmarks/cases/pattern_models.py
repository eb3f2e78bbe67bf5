"""What models are made of: layers, operators, ways to reuse weights and to return results.

Each is trained by the plain step; unusual ways to run the step are in `patterns`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn

from trainfit import Step

from . import Case
from .patterns import GPT, MLP, Block, language_loss, language_step, pattern, random_tokens, regression_step

CASES: list[Case] = []


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def mean_square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def image_step(model: nn.Module, images: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Step:
    """The plain step of a classifier of ten classes."""
    labels = torch.randint(0, 10, (len(images),))
    return Step.of(
        model,
        images,
        loss=lambda logits: F.cross_entropy(logits, labels),
        optimizer=optimizer or adamw(model),
    )


# ---------------------------------------------------------------------------- outputs and weight sharing


@pattern(CASES, "outputs")
def dict_output() -> Step:
    class Model(GPT):
        def forward(self, tokens: Tensor) -> dict[str, Any]:
            logits = super().forward(tokens)
            return {"loss": language_loss(logits, tokens), "more": {"logits": logits}}

    model = Model()
    return Step.of(model, random_tokens(), optimizer=adamw(model))


@dataclass
class Prediction:
    """What a model returns, as a plain dataclass."""

    loss: Tensor
    logits: Tensor
    hidden: list[Tensor]


@pattern(CASES, "outputs")
def dataclass_output() -> Step:
    class Model(GPT):
        def forward(self, tokens: Tensor) -> Prediction:
            hidden = [self.embedding(tokens)]
            for block in self.blocks:
                hidden.append(block(hidden[-1]))
            logits = self.head(self.norm(hidden[-1]))
            return Prediction(language_loss(logits, tokens), logits, hidden)

    model = Model()
    return Step.of(model, random_tokens(), optimizer=adamw(model))


class Mixture:
    """What a model returns, as an opaque object."""

    __slots__ = ("_means", "_weights")

    def __init__(self, means: Tensor, weights: Tensor) -> None:
        self._means = means
        self._weights = weights

    def distance(self, targets: Tensor) -> Tensor:
        """Mean weighted distance of the components from the targets."""
        squares = (self._means - targets[:, None]).pow(2).mean(-1)
        return (self._weights.softmax(-1) * squares).sum(-1).mean()


@pattern(CASES, "outputs")
def custom_object_output() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = MLP()
            self.means = nn.Linear(512, 4 * 128)
            self.weights = nn.Linear(512, 4)

        def forward(self, x: Tensor) -> Mixture:
            features = self.trunk(x)
            return Mixture(self.means(features).unflatten(-1, (4, 128)), self.weights(features))

    model = Model()
    targets = torch.randn(1024, 128)
    return Step.of(
        model,
        torch.randn(1024, 512),
        loss=lambda mixture: mixture.distance(targets),
        optimizer=adamw(model),
    )


@pattern(CASES, "outputs")
def nested_tuple_output() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = MLP(), MLP()

        def forward(self, x: Tensor) -> tuple[Any, ...]:
            a = self.first(x)
            b = self.second(a)
            return (a, (b, [a + b, None], "note"))

    model = Model()
    return Step.of(
        model,
        torch.randn(512, 512),
        loss=lambda output: (output[1][1][0] - 1).pow(2).mean(),
        optimizer=adamw(model),
    )


@pattern(CASES, "weight sharing")
def tied_weights() -> Step:
    model = GPT(vocabulary=4000)
    model.head.weight = model.embedding.weight
    return language_step(model)


@pattern(CASES, "weight sharing")
def block_called_in_a_loop() -> Step:
    class Model(GPT):
        def __init__(self) -> None:
            super().__init__(depth=1)

        def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
            for _ in range(4):
                x = block(x)
            return x

    return language_step(Model())


@pattern(CASES, "weight sharing")
def siamese_towers() -> Step:
    model = MLP(outputs=128)
    left, right = torch.randn(512, 512), torch.randn(512, 512)
    optimizer = adamw(model)

    def run() -> Tensor:
        similarity = F.normalize(model(left), dim=-1) @ F.normalize(model(right), dim=-1).T
        loss = F.cross_entropy(similarity / 0.07, torch.arange(len(left)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "weight sharing")
def parameter_list() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(512, 512) / 22 for _ in range(4))
            self.scales = nn.ParameterDict({"last": nn.Parameter(torch.ones(512))})

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = torch.tanh(x @ weight)
            return x * self.scales["last"]

    model = Model()
    return regression_step(model, adamw(model))


@pattern(CASES, "weight sharing")
def weight_norm() -> Step:
    model = MLP()
    for layer in model:
        if isinstance(layer, nn.Linear):
            parametrizations.weight_norm(layer)
    return regression_step(model, adamw(model))


@pattern(CASES, "weight sharing")
def spectral_norm() -> Step:
    model = MLP()
    for layer in model:
        if isinstance(layer, nn.Linear):
            parametrizations.spectral_norm(layer)
    return regression_step(model, adamw(model))


@pattern(CASES, "weight sharing", data_dependent=True)
def orthogonal_weights() -> Step:
    # The matrix exponential chooses its number of terms by the norm of the weights.
    model = nn.Sequential(*[parametrizations.orthogonal(nn.Linear(256, 256)) for _ in range(3)])
    return Step.of(model, torch.randn(1024, 256), loss=mean_square, optimizer=adamw(model))


@pattern(CASES, "weight sharing")
def hypernetwork() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.writer = nn.Linear(16, 128 * 128)
            self.codes = nn.Parameter(torch.randn(4, 16))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.writer(self.codes).view(4, 128, 128):
                x = F.gelu(F.linear(x, weight))
            return x

    model = Model()
    return Step.of(model, torch.randn(4096, 128), loss=mean_square, optimizer=adamw(model))


# ----------------------------------------------------------------------------------------------- layers


@pattern(CASES, "layers")
def inplace_activations() -> Step:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [
            nn.Linear(512, 512),
            nn.LayerNorm(512),
            nn.Dropout(0.1, inplace=True),
            nn.ReLU(inplace=True),
        ]
    model = nn.Sequential(*layers)
    return regression_step(model, adamw(model))


@pattern(CASES, "layers")
def inplace_residual() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            for layer in self.layers[1:]:
                change = F.silu(layer(x))
                change += x
                change[:, :64].mul_(0.5)
                x = change
            return x

    model = Model()
    return regression_step(model, adamw(model))


@pattern(CASES, "layers")
def dropout_everywhere() -> Step:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1), nn.AlphaDropout(0.1)]
    model = nn.Sequential(*layers)
    return regression_step(model, adamw(model))


class Tagger(nn.Module):
    """A recurrent layer between an embedding and a head."""

    def __init__(self, recurrent: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.recurrent = recurrent
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        output, _ = self.recurrent(self.embedding(tokens))
        return self.head(output)


@pattern(CASES, "layers")
def lstm() -> Step:
    return language_step(Tagger(nn.LSTM(128, 192, num_layers=2, batch_first=True, dropout=0.1), 192))


@pattern(CASES, "layers")
def lstm_bidirectional() -> Step:
    return language_step(Tagger(nn.LSTM(128, 96, batch_first=True, bidirectional=True), 192))


@pattern(CASES, "layers")
def gru() -> Step:
    return language_step(Tagger(nn.GRU(128, 192, num_layers=2, batch_first=True), 192))


@pattern(CASES, "layers")
def lstm_packed_sequences() -> Step:
    class Model(Tagger):
        def forward(self, tokens: Tensor) -> Tensor:
            lengths = torch.tensor([128, 120, 100, 90, 70, 64, 30, 12])
            packed = rnn.pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True)
            output, _ = rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
            return self.head(output)

    return language_step(Model(nn.LSTM(128, 192, batch_first=True), 192))


@pattern(CASES, "layers")
def lstm_cell_decoder() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(500, 128)
            self.cell = nn.LSTMCell(128, 192)
            self.head = nn.Linear(192, 500)

        def forward(self, tokens: Tensor) -> Tensor:
            state = (torch.zeros(len(tokens), 192), torch.zeros(len(tokens), 192))
            logits = []
            for token in self.embedding(tokens).unbind(1):
                state = self.cell(token, state)
                logits.append(self.head(state[0]))
            return torch.stack(logits, 1)

    model = Model()
    tokens = random_tokens(16, 64, 500)
    return Step.of(model, tokens, loss=lambda logits: language_loss(logits, tokens), optimizer=adamw(model))


@pattern(CASES, "layers")
def transformer_encoder() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, 128)
            layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, num_layers=3)
            self.head = nn.Linear(128, 1000)

        def forward(self, tokens: Tensor) -> Tensor:
            padding = tokens < 50
            return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=padding))

    return language_step(Model())


@pattern(CASES, "layers")
def transformer_encoder_decoder() -> Step:
    model = nn.Transformer(128, 4, 2, 2, 512, batch_first=True, norm_first=True)
    source, target = torch.randn(8, 128, 128), torch.randn(8, 96, 128)
    mask = nn.Transformer.generate_square_subsequent_mask(96)
    inputs = {"src": source, "tgt": target, "tgt_mask": mask, "tgt_is_causal": True}
    return Step.of(model, inputs, loss=mean_square, optimizer=adamw(model))


@pattern(CASES, "layers")
def attention_with_weights() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.MultiheadAttention(128, 4, dropout=0.1, batch_first=True) for _ in range(3)
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            entropy = torch.zeros(())
            for layer in self.layers:
                attended, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
                x = x + attended
                entropy = entropy - (weights * (weights + 1e-6).log()).sum(-1).mean()
            return mean_square(x) + 0.01 * entropy, x

    model = Model()
    return Step.of(model, torch.randn(8, 128, 128), optimizer=adamw(model))


@pattern(CASES, "layers")
def rms_norm_and_rotary() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(192) for _ in range(4))
            self.layers = nn.ModuleList(nn.Linear(192, 192, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            angle = torch.arange(x.shape[1])[:, None] / 10000 ** (torch.arange(0, 192, 2) / 192)
            cosine, sine = angle.cos(), angle.sin()
            for norm, layer in zip(self.norms, self.layers):
                even, odd = layer(norm(x)).chunk(2, -1)
                x = x + torch.cat([even * cosine - odd * sine, even * sine + odd * cosine], -1)
            return x

    model = Model()
    return Step.of(model, torch.randn(8, 256, 192), loss=mean_square, optimizer=adamw(model))


@pattern(CASES, "layers")
def embedding_bag() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(5000, 64, mode="mean") for _ in range(6))
            self.head = MLP(256, 3, inputs=6 * 64, outputs=10)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.cat([table(part) for table, part in zip(self.tables, ids.unbind(1))], 1))

    return image_step(Model(), torch.randint(0, 5000, (512, 6, 10)))


@pattern(CASES, "layers", data_dependent=True)
def stochastic_depth() -> Step:
    class Model(GPT):
        def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
            return x if torch.rand(()) < 0.25 else block(x)

    return language_step(Model(depth=6))


@pattern(CASES, "layers", data_dependent=True)
def mixture_of_experts() -> Step:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(128, 8)
            self.experts = nn.ModuleList(MLP(512, 2, 128, 128) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            weights, chosen = self.router(flat).softmax(-1).topk(2)
            output = torch.zeros_like(flat)
            for index, expert in enumerate(self.experts):
                rows, slots = (chosen == index).nonzero(as_tuple=True)
                output.index_add_(0, rows, expert(flat[rows]) * weights[rows, slots, None])
            return output.view_as(x)

    model = GPT(depth=2)
    for block in model.blocks:
        block.feedforward = Experts()
    return language_step(model)


@pattern(CASES, "layers")
def variational_autoencoder() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = MLP(outputs=2 * 64)
            self.decoder = MLP(inputs=64)

        def forward(self, x: Tensor) -> Tensor:
            mean, log_variance = self.encoder(x).chunk(2, -1)
            latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
            surplus = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(-1).mean()
            return F.mse_loss(self.decoder(latent), x) + 1e-3 * surplus

    model = Model()
    return Step.of(model, torch.randn(1024, 512), optimizer=adamw(model))


@pattern(CASES, "layers")
def model_ensemble_vmap() -> Step:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            members = [MLP(256, 3, 256, 256) for _ in range(4)]
            self.template = [members[0].to("meta")]  # in a list: not a submodule of the ensemble
            members[0] = MLP(256, 3, 256, 256)
            stacked, _ = torch.func.stack_module_state(members)
            self.names = list(stacked)
            self.stacked = nn.ParameterList(nn.Parameter(value.detach()) for value in stacked.values())

        def forward(self, x: Tensor) -> Tensor:
            def one(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
                return torch.func.functional_call(self.template[0], weights, (inputs,))

            return torch.vmap(one, in_dims=(0, None))(dict(zip(self.names, self.stacked)), x)

    model = Ensemble()
    return Step.of(model, torch.randn(512, 256), loss=mean_square, optimizer=adamw(model))


# ------------------------------------------------------------------------------------------ convolutions


def conv_block(inputs: int, outputs: int, norm: nn.Module, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, norm, nn.ReLU(inplace=True))


@pattern(CASES, "convolutions", convolutions=True)
def batch_norm_convnet() -> Step:
    widths = [3, 32, 64, 96]
    blocks = [conv_block(a, b, nn.BatchNorm2d(b), 2) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))
    return image_step(model, torch.randn(32, 3, 64, 64))


@pattern(CASES, "convolutions", convolutions=True)
def channels_last_convnet() -> Step:
    widths = [3, 32, 64, 96]
    blocks = [conv_block(a, b, nn.BatchNorm2d(b), 2) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))
    model = model.to(memory_format=torch.channels_last)
    images = torch.randn(32, 3, 64, 64).to(memory_format=torch.channels_last)
    return image_step(model, images, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@pattern(CASES, "convolutions", convolutions=True)
def group_norm_convnet() -> Step:
    widths = [3, 32, 64, 96]
    blocks = [conv_block(a, b, nn.GroupNorm(8, b), 2) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*blocks, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96 * 16, 10))
    return image_step(model, torch.randn(32, 3, 64, 64))


@pattern(CASES, "convolutions", convolutions=True)
def depthwise_convnet() -> Step:
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 4, 4)]
    for _ in range(3):
        layers += [
            nn.Conv2d(48, 48, 5, padding=2, groups=48),
            nn.InstanceNorm2d(48, affine=True),
            nn.Conv2d(48, 96, 1),
            nn.Hardswish(),
            nn.Conv2d(96, 48, 1),
        ]
    model = nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(48 * 16, 10))
    return image_step(model, torch.randn(16, 3, 64, 64))


@pattern(CASES, "convolutions", convolutions=True)
def conv1d_dilated() -> Step:
    layers: list[nn.Module] = [nn.Conv1d(1, 64, 3, padding=1)]
    for depth in range(4):
        layers += [nn.Conv1d(64, 64, 3, padding=2**depth, dilation=2**depth), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Conv1d(64, 1, 1))
    return Step.of(model, torch.randn(8, 1, 1024), loss=mean_square, optimizer=adamw(model))


@pattern(CASES, "convolutions", convolutions=True)
def conv3d_video() -> Step:
    model = nn.Sequential(
        nn.Conv3d(3, 16, 3, padding=1),
        nn.BatchNorm3d(16),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return image_step(model, torch.randn(8, 3, 16, 32, 32))


class UNet(nn.Module):
    """Down, up again, with skip connections and transposed convolutions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = conv_block(3, width, nn.GroupNorm(4, width))
        self.down = nn.ModuleList(
            conv_block(width * 2**i, width * 2 ** (i + 1), nn.GroupNorm(4, width * 2 ** (i + 1)), 2)
            for i in range(2)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(width * 2 ** (i + 1), width * 2**i, 2, 2) for i in reversed(range(2))
        )
        self.join = nn.ModuleList(
            nn.Conv2d(width * 2 ** (i + 1), width * 2**i, 1) for i in reversed(range(2))
        )
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.first(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up, join in zip(self.up, self.join):
            x = F.silu(join(torch.cat([up(x), skips.pop()], 1)))
        return self.last(x)


@pattern(CASES, "convolutions", convolutions=True)
def unet_denoising() -> Step:
    model = UNet()
    optimizer = adamw(model)
    images = torch.randn(8, 3, 64, 64)
    kept = torch.linspace(0.99, 0.01, 1000)

    def run() -> Tensor:
        level = kept[torch.randint(0, 1000, (8,))][:, None, None, None]
        noise = torch.randn_like(images)
        loss = F.mse_loss(model(level.sqrt() * images + (1 - level).sqrt() * noise), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


@pattern(CASES, "convolutions", convolutions=True)
def upsampling_and_padding() -> Step:
    model = nn.Sequential(
        nn.ReflectionPad2d(1),
        nn.Conv2d(3, 32, 3),
        nn.PReLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(32, 32, 3, padding=1, padding_mode="circular"),
        nn.ELU(),
        nn.PixelUnshuffle(2),
        nn.Conv2d(128, 12, 1),
        nn.PixelShuffle(2),
    )
    return Step.of(model, torch.randn(4, 3, 48, 48), loss=mean_square, optimizer=adamw(model))


@pattern(CASES, "convolutions", convolutions=True)
def spatial_transformer() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.locate = nn.Sequential(
                nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
            )
            self.affine = nn.Linear(16 * 16, 6)
            self.look = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten())
            self.head = nn.Linear(32 * 16, 10)

        def forward(self, images: Tensor) -> Tensor:
            theta = self.affine(self.locate(images)).view(-1, 2, 3)
            grid = F.affine_grid(theta, list(images.shape), align_corners=False)
            return self.head(self.look(F.grid_sample(images, grid, align_corners=False)))

    return image_step(Model(), torch.randn(16, 3, 64, 64))


# -------------------------------------------------------------------------------------------- operators


class Between(nn.Module):
    """Two linear layers with some operation between them."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.after = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.operate(self.before(x)))

    def operate(self, x: Tensor) -> Tensor:
        """Do what the pattern is about; `x` is (batch, sequence, width)."""
        raise NotImplementedError


def operator_step(model: nn.Module, shape: tuple[int, ...] = (8, 256, 256)) -> Step:
    return Step.of(model, torch.randn(shape), loss=mean_square, optimizer=adamw(model))


@pattern(CASES, "operators")
def gather_and_scatter() -> Step:
    class Model(Between):
        def operate(self, x: Tensor) -> Tensor:
            index = torch.randint(0, x.shape[1], x.shape)
            gathered = torch.gather(x, 1, index)
            added = torch.zeros_like(x).scatter_add(1, index, gathered)
            return torch.scatter(added, 2, index[:, :, :16], gathered[:, :, :16])

    return operator_step(Model())


@pattern(CASES, "operators")
def index_put() -> Step:
    class Model(Between):
        def operate(self, x: Tensor) -> Tensor:
            rows = torch.randint(0, x.shape[1], (100,))
            memory = torch.zeros(x.shape[1], x.shape[2])
            memory = memory.index_put((rows,), x[0, rows], accumulate=True)
            memory = memory.index_copy(0, torch.arange(10), x[1, :10])
            return x + memory[None]

    return operator_step(Model())


@pattern(CASES, "operators")
def sort_topk_cumsum() -> Step:
    class Model(Between):
        def operate(self, x: Tensor) -> Tensor:
            ordered, order = x.sort(dim=1)
            best, where = x.topk(32, dim=1)
            total = ordered.cumsum(1) + torch.logcumsumexp(x, 1)
            return total.scatter(1, where, best) + x.cummax(1).values + order.float() / 256

    return operator_step(Model())


@pattern(CASES, "operators")
def einsum() -> Step:
    class Model(Between):
        def operate(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (4, 64))
            scores = torch.einsum("bqhd,bkhd->bhqk", heads, heads).softmax(-1)
            mixed = torch.einsum("bhqk,bkhd->bqhd", scores, heads)
            return torch.einsum("bqhd,hde->bqhe", mixed, torch.ones(4, 64, 64) / 64).flatten(2)

    return operator_step(Model())


@pattern(CASES, "operators")
def fourier_transform() -> Step:
    class Model(Between):
        def operate(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(x, dim=1)
            spectrum = spectrum * torch.sigmoid(spectrum.abs())
            return torch.fft.irfft(spectrum, n=x.shape[1], dim=1) + torch.fft.fft2(x).real / 256

    return operator_step(Model())


@pattern(CASES, "operators")
def complex_numbers() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(256, 256, dtype=torch.complex64) / 16)
            self.phase = nn.Parameter(torch.rand(256))

        def forward(self, x: Tensor) -> Tensor:
            z = torch.view_as_complex(x.unflatten(-1, (256, 2)))
            for _ in range(3):
                z = (z @ self.weight) * torch.polar(torch.ones(256), self.phase)
                z = z / (1 + z.abs())
            return torch.view_as_real(z).flatten(-2)

    return operator_step(Model(), (8, 128, 512))


@pattern(CASES, "operators")
def fourier_features() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.randn(2, 128) * 10)
            self.network = MLP(256, 4, inputs=256, outputs=3)

        def forward(self, points: Tensor) -> Tensor:
            angles = points @ self.frequencies
            return self.network(torch.cat([angles.sin(), angles.cos()], -1))

    return operator_step(Model(), (4096, 2))


@pattern(CASES, "operators")
def linear_algebra() -> Step:
    class Model(Between):
        def operate(self, x: Tensor) -> Tensor:
            covariance = x.transpose(1, 2) @ x / x.shape[1] + torch.eye(x.shape[2])
            factor = torch.linalg.cholesky(covariance)
            solved = torch.linalg.solve_triangular(factor, x.transpose(1, 2), upper=False)
            return solved.transpose(1, 2) * torch.logdet(covariance)[:, None, None].tanh()

    return operator_step(Model(128), (32, 128, 128))


@pattern(CASES, "operators")
def views_and_strides() -> Step:
    class Model(Between):
        def operate(self, x: Tensor) -> Tensor:
            windows = x.unfold(1, 16, 8).mean(-1)
            first, second = x.transpose(1, 2).contiguous().chunk(2, 1)
            flipped = torch.cat([second, first], 1).transpose(1, 2).flip(1).roll(3, 2)
            repeated = F.interpolate(windows.transpose(1, 2), size=x.shape[1]).transpose(1, 2)
            return torch.where(flipped > 0, flipped, repeated.expand_as(flipped))

    return operator_step(Model())


@pattern(CASES, "operators", data_dependent=True)
def boolean_masks() -> Step:
    class Model(Between):
        def operate(self, x: Tensor) -> Tensor:
            mask = x.mean(-1) > 0
            kept = F.gelu(x[mask]) * 2
            output = torch.zeros_like(x)
            output[mask] = kept
            return output + x.masked_fill(~mask[..., None], 0.0)

    return operator_step(Model())


@pattern(CASES, "operators")
def graph_messages() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message = nn.ModuleList(MLP(128, 2, inputs=128, outputs=64) for _ in range(3))

        def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
            for message in self.message:
                sent = message(torch.cat([nodes[source], nodes[target]], -1))
                received = torch.zeros_like(nodes).index_add(0, target, sent)
                degree = torch.zeros(len(nodes)).index_add(0, target, torch.ones(len(target)))
                nodes = nodes + received / degree.clamp(min=1)[:, None]
            return mean_square(nodes)

    model = Model()
    edges = torch.randint(0, 500, (2, 4000))
    return Step.of(model, (torch.randn(500, 64), edges[0], edges[1]), optimizer=adamw(model))


@pattern(CASES, "operators")
def ctc_loss() -> Step:
    model = MLP(256, 3, inputs=256, outputs=32)
    labels = torch.randint(1, 32, (8, 20))
    lengths = torch.full((8,), 256), torch.full((8,), 20)

    def loss(logits: Tensor) -> Tensor:
        return F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), labels, *lengths)

    return Step.of(model, torch.randn(8, 256, 256), loss=loss, optimizer=adamw(model))


@pattern(CASES, "operators")
def pairwise_distances() -> Step:
    model = MLP(256, 3, inputs=256, outputs=64)
    labels = torch.randint(0, 10, (384,))

    def loss(points: Tensor) -> Tensor:
        distances = torch.cdist(points, points)
        same = labels[:, None] == labels[None, :]
        nearest = distances.masked_fill(same, float("inf")).amin(1)
        farthest = distances.masked_fill(~same, 0.0).amax(1)
        return F.relu(farthest - nearest + 1).mean() + 0.01 * (points[:, None] - points).abs().mean()

    return Step.of(model, torch.randn(384, 256), loss=loss, optimizer=adamw(model))


@pattern(CASES, "operators")
def explicit_attention() -> Step:
    class Model(GPT):
        def run_block(self, block: Block, x: Tensor) -> Tensor:
            queries, keys, values = block.qkv(block.attention_norm(x)).unflatten(-1, (3, 4, -1)).unbind(-3)
            scores = queries.transpose(1, 2) @ keys.permute(0, 2, 3, 1) / queries.shape[-1] ** 0.5
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            weights = F.dropout(scores.masked_fill(future, float("-inf")).softmax(-1), 0.1)
            x = x + block.projection((weights @ values.transpose(1, 2)).transpose(1, 2).flatten(2))
            return x + block.feedforward(block.feedforward_norm(x))

    return language_step(Model())
