# A distribution's own image from a registry, with what every worker needs.
ARG BASE
FROM ${BASE}
ARG PACKAGES
RUN apt-get update -q \
    && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends ${PACKAGES} \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
