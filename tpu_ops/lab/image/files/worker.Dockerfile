# The worker layer: turns a base system into a worker of the lab.
ARG BASE
FROM ${BASE}
COPY root/ /
RUN sh /usr/local/lib/tpu-lab/setup.sh
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT ["/usr/local/lib/tpu-lab/init"]
