{{/*
What neither the schema nor the CRD can say: the operator's own rules, and values that must fit each
other. Each message names the values and the fix.
*/}}
{{- define "paceline.rules" -}}
{{- $v := .Values -}}
{{- $engine := $v.engine -}}
{{- $name := include "paceline.fullname" . -}}
{{- if gt (len $name) 47 -}}
{{- fail (printf "the name %s has %d characters, a RayService takes 47: choose a shorter release name or set fullnameOverride" $name (len $name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name %s is no DNS label that begins with a letter (a-z, 0-9, -): choose another release name or set fullnameOverride" $name) -}}
{{- end -}}

{{- $layout := fromJson (include "paceline.layout" .) -}}
{{- $ranks := int $layout.ranks -}}
{{- $perPod := int $layout.perPod -}}
{{- if not $layout.isWhole -}}
{{- fail (printf "worker.ranksPerPod is %d, but a replica has %d ranks: set a divisor or a multiple of %d, or 0" $perPod $ranks $ranks) -}}
{{- end -}}
{{- if and $engine.strict_pack (lt $perPod $ranks) -}}
{{- fail (printf "engine.strict_pack wants the %d ranks of a replica on one node, but worker.ranksPerPod is %d: set it to 0 or remove strict_pack" $ranks $perPod) -}}
{{- end -}}
{{- $needed := div (add (mul 8 $perPod) ($engine.num_ingress_replicas | default 1 | int) 9) 10 | int -}}
{{- if lt (int $v.worker.cpu) $needed -}}
{{- fail (printf "worker.cpu is %d, but %d ranks in a pod and the HTTP front need %d: set worker.cpu to at least %d" (int $v.worker.cpu) $perPod $needed $needed) -}}
{{- end -}}

{{- $gang := $engine.data_parallel_size | default 1 | int -}}
{{- if mod ($engine.num_replicas | default $gang | int) $gang -}}
{{- fail (printf "engine.num_replicas is %d, no multiple of engine.data_parallel_size %d: replicas start in whole gangs" (int $engine.num_replicas) $gang) -}}
{{- end -}}
{{- if $v.autoscaling.enabled -}}
{{- if $engine.num_replicas -}}
{{- fail "autoscaling.enabled decides the number of replicas: remove engine.num_replicas" -}}
{{- end -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas is %d, above autoscaling.maxReplicas %d" (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if or (mod (int $v.autoscaling.minReplicas) $gang) (mod (int $v.autoscaling.maxReplicas) $gang) -}}
{{- fail (printf "autoscaling.minReplicas and maxReplicas must be multiples of engine.data_parallel_size %d: replicas start in whole gangs" $gang) -}}
{{- end -}}
{{- end -}}

{{- $most := ($engine.speculative_config | default dict).num_speculative_tokens | int -}}
{{- if and $most (gt (int $v.runtime.max_speculative_tokens) $most) -}}
{{- fail (printf "runtime.max_speculative_tokens is %d, above engine.speculative_config.num_speculative_tokens %d, which it can only lower" (int $v.runtime.max_speculative_tokens) $most) -}}
{{- end -}}

{{- if and $v.apiKeys.existingSecret (not $engine.api_keys_env) -}}
{{- fail "apiKeys.existingSecret is set, but nothing reads it: set engine.api_keys_env, for example to PACELINE_API_KEYS" -}}
{{- end -}}
{{- if and $engine.api_keys_env (not $v.apiKeys.existingSecret) -}}
{{- $given := false -}}
{{- range $v.extraEnv }}{{ if eq .name $engine.api_keys_env }}{{ $given = true }}{{ end }}{{ end -}}
{{- if not $given -}}
{{- fail (printf "engine.api_keys_env names %s, but nothing sets it: set apiKeys.existingSecret, or give it in extraEnv" $engine.api_keys_env) -}}
{{- end -}}
{{- end -}}

{{- $upgrade := $v.upgradeStrategy -}}
{{- if eq $upgrade.type "NewClusterWithIncrementalUpgrade" -}}
{{- if not $v.autoscaling.enabled -}}
{{- fail "upgradeStrategy.type NewClusterWithIncrementalUpgrade needs autoscaling.enabled: true; or use NewCluster" -}}
{{- end -}}
{{- if not $upgrade.gatewayClassName -}}
{{- fail "upgradeStrategy.type NewClusterWithIncrementalUpgrade needs upgradeStrategy.gatewayClassName" -}}
{{- end -}}
{{- if gt (int $upgrade.stepSizePercent) (int $upgrade.maxSurgePercent) -}}
{{- fail (printf "upgradeStrategy.stepSizePercent is %d, above maxSurgePercent %d" (int $upgrade.stepSizePercent) (int $upgrade.maxSurgePercent)) -}}
{{- end -}}
{{- end -}}

{{- if and $v.gcsFaultTolerance.enabled (not $v.gcsFaultTolerance.redisAddress) -}}
{{- fail "gcsFaultTolerance.enabled needs gcsFaultTolerance.redisAddress, for example redis:6379" -}}
{{- end -}}
{{- if and (eq $v.auth.mode "disabled") $v.auth.existingSecret -}}
{{- fail "auth.existingSecret is set, but auth.mode is disabled: set auth.mode to token or remove the secret" -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs, the Gateway to attach to: [{name: my-gateway}]" -}}
{{- end -}}
{{- if and (or $v.metrics.rules $v.metrics.dashboards) (not $v.metrics.enabled) -}}
{{- fail "metrics.rules and metrics.dashboards show what metrics.enabled scrapes: set metrics.enabled: true" -}}
{{- end -}}
{{- end -}}
