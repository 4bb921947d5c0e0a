# Paceline with Ray, for head and workers. GPUs come from torch's own CUDA libraries and the node's
# driver. For CPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

# g++ (with gcc): our C kernels and compiled layers are built on the machine that runs them, for its
# CPU or GPU. wget: KubeRay's probes.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ wget \
 && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /opt/paceline
# What rarely changes first: a change of the code installs nothing again.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt \
 && pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} -r requirements.txt
COPY README.md ./
COPY specconfig specconfig
COPY parallel parallel
COPY actors actors
COPY deploy deploy
COPY training training
RUN pip install --no-deps . \
 && useradd --uid 1000 --create-home --shell /bin/bash ray \
 && install -d -o ray -g ray /cache

ENV RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HF_HOME=/cache/huggingface \
    PACELINE_CACHE=/cache/paceline
USER 1000:1000
WORKDIR /home/ray
CMD ["paceline", "--help"]
