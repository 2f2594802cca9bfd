"""A complete tenant in pyzmq, msgpack and numpy alone: all it takes in another language.

python examples/raw_tenant.py .joynexus/client.toml            # who am I, and how is the cluster?
python examples/raw_tenant.py .joynexus/client.toml my-policy  # one chunk of actions of a served policy
"""

import sys
import tomllib
import uuid
from pathlib import Path

import msgpack
import numpy as np
import zmq


def call(kind, body, arrays=()):
    """Send one request, wait for its answer: frames are magic, header, body, and one frame an array."""
    header = {"kind": kind, "id": uuid.uuid4().hex, "sizes": [array.nbytes for array in arrays]}
    socket.send_multipart([b"JNX1", msgpack.packb(header), msgpack.packb(body), *arrays])
    while socket.poll(10_000):
        _, answer_header, answer, *buffers = socket.recv_multipart()
        answer_header, answer = msgpack.unpackb(answer_header), msgpack.unpackb(answer)
        if answer_header["kind"] == "failure":
            sys.exit(f"{answer['code']}: {answer['message']}")
        if answer_header["re"] == header["id"]:
            return answer, buffers
    sys.exit("the service does not answer: is it running, and is this key still valid?")


path = Path(sys.argv[1])
cluster = tomllib.loads(path.read_text())
keys = tomllib.loads((path.parent / cluster["key_file"]).read_text())
socket = zmq.Context().socket(zmq.DEALER)  # encrypted both ways; the key says which tenant this is
socket.curve_serverkey = cluster["server_public"].encode()
socket.curve_publickey, socket.curve_secretkey = keys["public"].encode(), keys["secret"].encode()
socket.linger = 0
socket.connect(cluster["control"])

welcome, _ = call("hello", {"protocol_min": 1, "protocol_max": 1, "client": "raw_tenant.py"})
print("tenant", welcome["tenant"], "with scope", welcome["scope"])
if len(sys.argv) == 2:
    status, _ = call("status", {})
    print("server", status["server"], "has", len(status["roles"]), "workers")
else:
    policy, _ = call("get_policy", {"policy": sys.argv[2]})
    contract = policy["spec"]["contract"]
    arrays = [np.zeros((1, contract["state_dim"]), "<f4")]
    arrays += [np.zeros((1, camera["height"], camera["width"], 3), "|u1") for camera in contract["cameras"]]
    state, *images = [{"dtype": a.dtype.str, "shape": a.shape, "frame": i} for i, a in enumerate(arrays)]
    act = {"policy": sys.argv[2], "state": state, "images": images, "instructions": ["do it"]}
    answer, buffers = call("act", act, arrays)
    actions = np.frombuffer(buffers[answer["actions"]["frame"]], answer["actions"]["dtype"])
    print("version", answer["version"], "acts:", actions.reshape(answer["actions"]["shape"]))
