{{- define "paceline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name -}}
{{- end -}}
{{- end -}}

{{/* Ours, not KubeRay's: those change with every upgrade. */}}
{{- define "paceline.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "paceline.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "paceline.selectorLabels" . }}
{{- end -}}

{{- define "paceline.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "paceline.serviceAccountName" -}}
{{- $own := .Values.serviceAccount.create | ternary (include "paceline.fullname" .) "" -}}
{{- .Values.serviceAccount.name | default $own -}}
{{- end -}}

{{- define "paceline.claim" -}}
{{- .Values.modelCache.existingClaim | default (printf "%s-cache" (include "paceline.fullname" .)) -}}
{{- end -}}

{{- define "paceline.service" -}}
{{ include "paceline.fullname" . }}-serve-svc
{{- end -}}

{{/*
How ranks are spread over pods, as JSON: ranks of one replica, ranks in a pod, pods at least and at
most. parallel/placement.py asks Ray for the same bundles; a test compares.
*/}}
{{- define "paceline.layout" -}}
{{- $engine := .Values.engine -}}
{{- $tp := $engine.tensor_parallel_size | default 1 | int -}}
{{- $draft := $engine.speculative_config | default dict -}}
{{- $ranks := $tp -}}
{{- if and (eq ($engine.placement | default "auto") "dedicated") $draft.model -}}
{{- $ranks = add $tp ($draft.draft_tensor_parallel_size | default $tp | int) | int -}}
{{- end -}}
{{- $perPod := .Values.worker.ranksPerPod | default $ranks | int -}}
{{- $least := $engine.num_replicas | default $engine.data_parallel_size | default 1 | int -}}
{{- $most := $least -}}
{{- if .Values.autoscaling.enabled -}}
{{- $least = .Values.autoscaling.minReplicas | int -}}
{{- $most = .Values.autoscaling.maxReplicas | int -}}
{{- end -}}
{{- $layout := dict "ranks" $ranks "perPod" $perPod "isWhole" (or (eq (mod $perPod $ranks) 0) (eq (mod $ranks $perPod) 0)) -}}
{{- $_ := set $layout "minPods" (div (sub (add (mul $least $ranks) $perPod) 1) $perPod | int) -}}
{{- $_ := set $layout "maxPods" (div (sub (add (mul $most $ranks) $perPod) 1) $perPod | int) -}}
{{- toJson $layout -}}
{{- end -}}

{{/* Environment of everything that reads models. */}}
{{- define "paceline.env" -}}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /cache/huggingface}
- {name: PACELINE_CACHE, value: /cache/paceline}
{{- with .Values.hfToken.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.hfToken.key | quote }}}}
{{- end }}
{{- end -}}

{{- define "paceline.apiKeysEnv" -}}
{{- if .Values.apiKeys.existingSecret }}
- name: {{ .Values.engine.api_keys_env | quote }}
  valueFrom: {secretKeyRef: {name: {{ .Values.apiKeys.existingSecret | quote }}, key: {{ .Values.apiKeys.key | quote }}}}
{{- end }}
{{- end -}}

{{- define "paceline.cacheVolume" -}}
name: cache
{{- if .Values.modelCache.enabled }}
persistentVolumeClaim: {claimName: {{ include "paceline.claim" . }}}
{{- else }}
emptyDir: {}
{{- end }}
{{- end -}}

{{/*
Pod template of head and workers. Takes a dict: root, role, group (values of head or worker),
ports, resources, shm, grace, annotations.
*/}}
{{- define "paceline.pod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
metadata:
  labels:
    {{- include "paceline.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    {{- with $values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with merge (.annotations | default dict) $values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  terminationGracePeriodSeconds: {{ .grace }}
  {{- with include "paceline.serviceAccountName" $root }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- if eq .role "worker" }}
  automountServiceAccountToken: false
  {{- end }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
  {{- with get $.group $field }}
  {{ $field }}: {{ toJson . }}
  {{- end }}
  {{- end }}
  securityContext: {{- toYaml $values.podSecurityContext | nindent 4 }}
  containers:
  - name: ray-{{ .role }}
    image: {{ include "paceline.image" $root | quote }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    env:
    {{- include "paceline.env" $root | nindent 4 }}
    {{- include "paceline.apiKeysEnv" $root | trim | nindent 4 }}
    {{- with $values.extraEnv }}{{ toYaml . | nindent 4 }}{{ end }}
    ports: {{- toYaml .ports | nindent 4 }}
    resources:
      limits: {{- toYaml .resources | nindent 8 }}
      requests: {{- toYaml .resources | nindent 8 }}
    securityContext: {{- toYaml $values.securityContext | nindent 6 }}
    # Worker: Serve starts the replicas elsewhere, lets these finish, then Ray ends; the pod's own end
    # would cut answers off. drainSeconds before the deadline Serve no longer waits for the new ones.
    # [S] keeps grep from finding this shell.
    lifecycle:
      preStop:
        exec:
          command:
          - /bin/bash
          - -c
          - >-
            {{- if eq .role "worker" }}
            ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "pod ends"
            --deadline-remaining-seconds {{ add $values.moveSeconds $values.drainSeconds }}
            && while grep -qs 'ray::[S]erveReplica' /proc/[0-9]*/cmdline; do sleep 1; done;
            {{- end }}
            ray stop
    volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /cache}
    - {name: shm, mountPath: /dev/shm}
    {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
  volumes:
  - {name: tmp, emptyDir: {}}
  - {{- include "paceline.cacheVolume" $root | nindent 4 }}
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .shm }}}}
  {{- with $values.extraVolumes }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}
