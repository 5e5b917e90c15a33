"""A trainer written from the .proto files alone, against two running servers.

    client.py ADDRESS ADDRESS

Two trainers fit a linear regression in Sync; what the servers hold afterwards must be, bit for bit, what the same
arithmetic gives here. Then frames that are wrong are sent, and each must be answered with its fault. The job is
what tests/integration/foreign_client.rs sets up: SGD with learning rate 0.125 and momentum 0.5.
"""

import queue
import struct
import sys
import threading

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from psjobs.v1 import coordination_pb2 as coordination
from psjobs.v1 import coordination_pb2_grpc, exchange_pb2_grpc
from psjobs.v1 import exchange_pb2 as exchange

JOB, TRAINERS, STEPS, DEADLINE = "job-1", 2, 8, 20
LEARNING_RATE, MOMENTUM = 0.125, 0.5
FEATURES, OUTPUTS, BATCH = 4, 3, 5
TENSORS = [("bias", [OUTPUTS]), ("weight", [OUTPUTS, FEATURES])]
PARAMETERS = OUTPUTS * (1 + FEATURES)
TRUE = [0.3 * i - 1 for i in range(PARAMETERS)]


def f32(values):
    """Rounded to single precision: of + - * / on two f32 that is what single precision itself gives."""
    return list(struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values)))


def gradient(trainer, step, parameters):
    """Of the mean squared error over a batch that follows from trainer and step."""
    total = [0.0] * PARAMETERS
    for example in range(BATCH):
        x = [((7 * trainer + 3 * step + 5 * example + 2 * i) % 11) / 11 for i in range(FEATURES)]
        for row in range(OUTPUTS):
            weights = slice(OUTPUTS + row * FEATURES, OUTPUTS + (row + 1) * FEATURES)
            predict = lambda p: p[row] + sum(w * v for w, v in zip(p[weights], x))
            error = (predict(parameters) - predict(TRUE)) / BATCH
            total[row] += error
            for i in range(FEATURES):
                total[OUTPUTS + row * FEATURES + i] += error * x[i]
    return f32(total)


def train_here():
    """The parameters of one process that does what trainers and servers do."""
    weights, momentum = [1.0] * PARAMETERS, [0.0] * PARAMETERS
    for step in range(STEPS):
        gradients = [gradient(trainer, step, weights) for trainer in range(TRAINERS)]
        mean = gradients[0]
        for other in gradients[1:]:
            mean = f32([a + b for a, b in zip(mean, other)])
        mean = f32([g / TRAINERS for g in mean])
        momentum = f32([a + g for a, g in zip(f32([MOMENTUM * m for m in momentum]), mean)])
        weights = f32([w - d for w, d in zip(weights, f32([LEARNING_RATE * m for m in momentum]))])
    return weights


class Stream:
    """An open Exchange: `up` is a queue of requests, `down` an iterator of answers."""

    def __init__(self, stub, trainer, **options):
        self.up = queue.Queue()
        self.down = stub.Exchange(iter(self.up.get, None), timeout=DEADLINE, **options)
        self.up.put(exchange.ExchangeRequest(open=exchange.Open(trainer=trainer)))


class Trainer:
    def __init__(self, channels, index):
        self.id = coordination.TrainerId(job_uid=JOB, index=index, incarnation=0)
        self.members = [coordination_pb2_grpc.CoordinationStub(channel) for channel in channels]
        self.blocks = [exchange_pb2_grpc.ParameterServerStub(channel) for channel in channels]
        self.parameters, self.versions = [1.0] * PARAMETERS, {}

    def join(self):
        tensors = [coordination.TensorSpec(name=name, shape=shape) for name, shape in TENSORS]
        request = coordination.JoinRequest(trainer=self.id, tensors=tensors, total_steps=STEPS)
        for server, (members, blocks) in enumerate(zip(self.members, self.blocks)):
            reply = members.Join(request, timeout=DEADLINE)
            assert (reply.server, reply.servers, reply.next_step) == (server, len(self.members), 0), reply
            self.block_elements = reply.block_elements
            # The first message only says who sends the values.
            values = [exchange.InitializeBlocksRequest(trainer=self.id)]
            values += [self.push(block) for block in reply.empty_blocks]
            # Trainers may give first values at the same time: those of the first are taken.
            assert blocks.InitializeBlocks(iter(values), timeout=DEADLINE).initialized < len(values)
        self.streams = [Stream(stub, self.id) for stub in self.blocks]

    def push(self, block):
        values = self.parameters[self.range(block)]
        payload = struct.pack(f"<{len(values)}f", *values)
        return exchange.InitializeBlocksRequest(block=block, codec=exchange.CODEC_F32, payload=payload)

    def range(self, block):
        return slice(block * self.block_elements, min((block + 1) * self.block_elements, PARAMETERS))

    def take(self, answer):
        values = self.parameters[self.range(answer.block)]
        assert answer.codec == exchange.CODEC_F32, answer
        self.parameters[self.range(answer.block)] = struct.unpack(f"<{len(values)}f", answer.payload)
        self.versions[answer.block] = answer.version

    def exchange(self, step):
        values = gradient(self.id.index, step, self.parameters)
        for server, stream in enumerate(self.streams):
            part = values[self.range(server)]
            frame = exchange.GradientBlock(
                step=step,
                block=server,  # One block a server in a model as small as this one.
                codec=exchange.CODEC_F32,
                version=self.versions.get(server, 0),
                payload=struct.pack(f"<{len(part)}f", *part),
            )
            stream.up.put(exchange.ExchangeRequest(gradient=frame))
        for server, stream in enumerate(self.streams):
            answer = next(stream.down)
            assert (answer.step, answer.block, answer.version) == (step, server, step + 1), answer
            self.take(answer)

    def pull(self):
        for stub in self.blocks:
            for block in stub.Pull(exchange.PullRequest(trainer=self.id), timeout=DEADLINE):
                self.take(block)
        return self.parameters

    def leave(self):
        for stream in self.streams:
            stream.up.put(None)
        self.members[0].WaitUntilDurable(coordination.WaitUntilDurableRequest(trainer=self.id), timeout=DEADLINE)
        request = coordination.LeaveRequest(trainer=self.id, finished=True, examples=STEPS * BATCH)
        for members in reversed(self.members):
            members.Leave(request, timeout=DEADLINE)


def in_parallel(work):
    """Runs `work(trainer)` for every trainer; a failure of one is a failure of all."""
    failures = []

    def run(index):
        try:
            work(index)
        except Exception as error:  # noqa: BLE001 - handed on below
            failures.append(error)

    threads = [threading.Thread(target=run, args=[index]) for index in range(TRAINERS)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for failure in failures:
        raise failure


def check_services(channel, members):
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "psjobs.v1.Coordination", "psjobs.v1.ParameterServer"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING, (service, reply)
    reflection = ProtoReflectionDescriptorDatabase(channel)
    assert "psjobs.v1.ParameterServer" in reflection.get_services(), reflection.get_services()
    file = reflection.FindFileContainingSymbol("psjobs.v1.ParameterServer")
    methods = {method.name: method for service in file.service for method in service.method}
    assert methods["Exchange"].client_streaming and methods["Exchange"].server_streaming, methods
    status = members.Status(coordination.StatusRequest(), timeout=DEADLINE)
    assert status.phase == coordination.JOB_PHASE_TRAINING, status
    assert (status.step, status.total_steps) == (TRAINERS * STEPS, TRAINERS * STEPS), status
    assert [trainer.state for trainer in status.trainers] == [coordination.TRAINER_STATE_ACTIVE] * TRAINERS, status


def check_refusals(channel, trainer):
    """Every row: what is sent after Open, and the code and words that must come back."""
    stub, code = trainer.blocks[0], grpc.StatusCode
    right = dict(step=STEPS, block=0, codec=exchange.CODEC_F32, version=STEPS, payload=bytes(4 * trainer.block_elements))
    frame = lambda **wrong: exchange.ExchangeRequest(gradient=exchange.GradientBlock(**{**right, **wrong}))
    nan = struct.pack("<f", float("nan")) + right["payload"][4:]
    gzip = dict(compression=grpc.Compression.Gzip)
    rows = [
        ("unknown block", frame(block=99), {}, code.INVALID_ARGUMENT, "block 99 does not exist"),
        ("another server's block", frame(block=1), {}, code.INVALID_ARGUMENT, "belongs to server 1"),
        ("unknown codec", frame(codec=77), {}, code.INVALID_ARGUMENT, "codec 77"),
        ("too short", frame(payload=bytes(12)), {}, code.INVALID_ARGUMENT, "found 12"),
        ("not finite", frame(step=0, payload=nan), {}, code.INVALID_ARGUMENT, "NaN or infinity"),
        ("too long a message", frame(payload=bytes(9 << 20)), {}, code.INVALID_ARGUMENT, "longer than"),
        ("compressed by gRPC", frame(payload=bytes(9000)), gzip, code.UNIMPLEMENTED, "compressed"),
        ("no message", exchange.ExchangeRequest(), {}, code.INVALID_ARGUMENT, "expected a gradient block"),
        ("cut", frame().SerializeToString()[:-3], {}, code.INVALID_ARGUMENT, "no protobuf"),
    ]
    raw = channel.stream_stream("/psjobs.v1.ParameterServer/Exchange")
    for label, message, options, want, words in rows:
        if isinstance(message, bytes):
            opened = exchange.ExchangeRequest(open=exchange.Open(trainer=trainer.id)).SerializeToString()
            answers = raw(iter([opened, message]), timeout=DEADLINE)
        else:
            stream = Stream(stub, trainer.id, **options)
            stream.up.put(message)
            answers = stream.down
        expect(label, lambda: next(answers), want, words)
    stranger = coordination.TrainerId(job_uid="job-2", index=0)
    expect("another job", lambda: next(Stream(stub, stranger).down), code.FAILED_PRECONDITION, "job-2")
    beyond = coordination.TrainerId(job_uid=JOB, index=TRAINERS)
    expect("beyond the job", lambda: next(Stream(stub, beyond).down), code.INVALID_ARGUMENT, f"trainer {TRAINERS}")


def expect(label, call, code, words):
    try:
        answer = call()
    except grpc.RpcError as error:
        assert error.code() == code and words in error.details(), f"{label}: {error.code()}: {error.details()}"
    else:
        raise AssertionError(f"{label}: answered with {answer}")


def main(addresses):
    channels = [grpc.insecure_channel(address) for address in addresses]
    trainers = [Trainer(channels, index) for index in range(TRAINERS)]
    in_parallel(lambda index: trainers[index].join())
    in_parallel(lambda index: [trainers[index].exchange(step) for step in range(STEPS)])
    want = train_here()
    for trainer in trainers:
        assert trainer.parameters == want, f"trainer {trainer.id.index} got {trainer.parameters}, not {want}"
        assert trainer.pull() == want, f"trainer {trainer.id.index} pulled {trainer.parameters}, not {want}"
    for channel in channels:
        check_services(channel, trainers[0].members[0])
    check_refusals(channels[0], trainers[0])
    assert trainers[0].pull() == want, "a frame that was refused changed the parameters"
    for trainer in trainers:
        trainer.leave()
    print(f"{TRAINERS} trainers, {STEPS} steps: bit for bit; every wrong frame was named")


main(sys.argv[1:])
