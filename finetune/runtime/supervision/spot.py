"""The notice before the preemption of a spot machine, from the cloud's metadata service.

aws    IMDSv2: spot/instance-action has a document before the machine is stopped, otherwise 404; 2 minutes' notice
       (docs.aws.amazon.com, "Spot Instance interruption notices")
gcp    instance/preempted is TRUE; 30 seconds (cloud.google.com, "Create and use Spot VMs")
azure  scheduledevents has an event `Preempt` for this machine; at least 30 seconds (learn.microsoft.com, "Scheduled
       Events"). The first response may take minutes, since the first request activates the service.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

Cloud = Literal["aws", "gcp", "azure"]

BASE_VARIABLE = "FINETUNE_METADATA_URL"
"""Environment variable that replaces the URL of the cloud's service."""

BASES: Mapping[Cloud, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}

_EVERY_SECONDS = 5.0
_TIMEOUT_SECONDS = 2.0


class SpotNotice:
    """Polls the cloud for a notice in its own thread."""

    def __init__(self, cloud: Cloud, *, log: Callable[[str], None]) -> None:
        self._poll_cloud = _POLL_FUNCTIONS[cloud]
        self._cloud = cloud
        self._base = os.environ.get(BASE_VARIABLE, BASES[cloud])
        self._log = log
        self._is_given = False
        self._has_warned = False

    def __call__(self) -> bool:
        """Return whether a notice was given."""
        return self._is_given

    def start(self) -> "SpotNotice":
        """Start polling, until a notice is given or the process ends."""
        threading.Thread(target=self._watch, name="spot notice", daemon=True).start()
        return self

    def poll(self) -> bool:
        """Poll once; a service that does not respond is logged once and polled again."""
        try:
            self._is_given = self._poll_cloud(self._base)
        except (OSError, ValueError) as error:
            if not self._has_warned:
                self._has_warned = True
                self._log(f"warning: run.spot_notice: the metadata service of {self._cloud} does not respond: {error}")
        return self._is_given

    def _watch(self) -> None:
        while not self.poll():
            time.sleep(_EVERY_SECONDS)


def _aws(base: str) -> bool:
    token = _get(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"}, method="PUT")
    try:
        _get(f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except HTTPError as error:
        if error.code != 404:
            raise
        return False
    return True


def _gcp(base: str) -> bool:
    answer = _get(f"{base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return answer.strip().upper() == "TRUE"


def _azure(base: str) -> bool:
    header = {"Metadata": "true"}
    events = json.loads(_get(f"{base}/metadata/scheduledevents?api-version=2020-07-01", header)).get("Events", [])
    if not events:
        return False
    name = _get(f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", header).strip()
    return any(event.get("EventType") == "Preempt" and name in event.get("Resources", ()) for event in events)


def _get(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str:
    """Return the response of the service, bypassing proxies."""
    request = Request(url, headers=dict(headers), method=method)
    with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_SECONDS) as answer:
        return str(answer.read().decode("utf-8"))


_POLL_FUNCTIONS: Mapping[Cloud, Callable[[str], bool]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}
