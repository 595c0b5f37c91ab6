{{/* What all pods have in common. Every helper takes a dict; `root` in it is the chart's context. */}}

{{/* {root, image} */}}
{{- define "cometmq.image" -}}
image: {{ if .image.digest }}{{ printf "%s@%s" .image.repository .image.digest }}{{ else }}{{ printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) }}{{ end }}
imagePullPolicy: {{ .image.pullPolicy }}
{{- end }}

{{/* Who the processes are, and who may help them: {root, settings, serviceAccount?}. Only a pod with a service account gets
its token. Service links would put variables named after Services of this namespace into the environment, and ours are
read as options: a release called "cometmq" would not start. */}}
{{- define "cometmq.podIdentity" -}}
{{- with .serviceAccount }}
serviceAccountName: {{ . }}
{{- end }}
automountServiceAccountToken: {{ not (empty .serviceAccount) }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- with .root.Values.security.runAsUser }}
  runAsUser: {{ int64 . }}
  {{- end }}
  {{- with .root.Values.security.runAsGroup }}
  runAsGroup: {{ int64 . }}
  {{- end }}
  {{- with .root.Values.security.fsGroup }}
  fsGroup: {{ int64 . }}
  # A store has many files: look at the folder only.
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "cometmq.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop:
      - ALL
{{- end }}

{{/* Where pods may run: {root, settings, component, group?}. */}}
{{- define "cometmq.placement" -}}
{{- $selector := include "cometmq.selector" . | fromYaml -}}
{{- $affinity := deepCopy .settings.affinity -}}
{{- if not (hasKey $affinity "podAntiAffinity") -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $selector) -}}
{{- if eq .settings.antiAffinity "required" -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- else if eq .settings.antiAffinity "preferred" -}}
{{- $weighted := dict "weight" 100 "podAffinityTerm" $term -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list $weighted)) -}}
{{- end -}}
{{- end -}}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := .settings.tolerations | default list -}}
{{- if hasKey .settings "evictAfterSeconds" -}}
{{- range $taint := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" -}}
{{- $said := false -}}
{{- range $.settings.tolerations -}}
{{- if eq (.key | default $taint) $taint }}{{ $said = true }}{{ end -}}
{{- end -}}
{{- if not $said -}}
{{- $tolerations = append $tolerations (dict "key" $taint "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" (int $.settings.evictAfterSeconds)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $constraint := deepCopy . }}
  {{- if not $constraint.labelSelector }}
  {{- $_ := set $constraint "labelSelector" (dict "matchLabels" $selector) }}
  {{- end }}
  - {{- toYaml $constraint | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Native gRPC probes: {settings}. "" = the process lives, "ready" = it serves in its role. */}}
{{- define "cometmq.probes" -}}
{{- $port := int .settings.port -}}
{{- range $kind, $service := dict "startup" "" "readiness" "ready" "liveness" "" }}
{{ $kind }}Probe:
  grpc:
    port: {{ $port }}
    service: {{ $service | quote }}
  {{- toYaml (index $.settings.probes $kind) | nindent 2 }}
{{- end }}
{{- end }}

{{/* Annotations of a pod: {settings, config}; another configuration restarts it. */}}
{{- define "cometmq.podAnnotations" -}}
checksum/config: {{ .config | sha256sum }}
{{- with .settings.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* HOME is one of the two places that a process may write to outside of its volumes. */}}
{{- define "cometmq.scratchEnv" -}}
- name: HOME
  value: /var/cache/cometmq
{{- end }}

{{- define "cometmq.scratchMounts" -}}
- name: tmp
  mountPath: /tmp
- name: user
  mountPath: /var/cache/cometmq
{{- end }}

{{- define "cometmq.scratchVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.scratch.sizeLimit }}
- name: user
  emptyDir:
    sizeLimit: {{ .Values.scratch.sizeLimit }}
{{- end }}

{{/* The secret of the internal ports, as a file. A folder, not a file of it (subPath): that would stay as it was when the
Secret changes. */}}
{{- define "cometmq.secretFile" -}}
/etc/cometmq-internal/{{ .Values.internalSecret.key }}
{{- end }}

{{- define "cometmq.secretMounts" -}}
{{- if .Values.internalSecret.enabled }}
- name: internal-secret
  mountPath: /etc/cometmq-internal
  readOnly: true
{{- end }}
{{- end }}

{{- define "cometmq.secretVolumes" -}}
{{- if .Values.internalSecret.enabled }}
- name: internal-secret
  secret:
    {{- if .Values.security.fsGroup }}
    defaultMode: 0440
    {{- end }}
    secretName: {{ .Values.internalSecret.existingSecret | default (include "cometmq.name" (dict "root" . "component" "internal")) }}
{{- end }}
{{- end }}

{{/* For the cometmq command. */}}
{{- define "cometmq.secretEnv" -}}
{{- if .Values.internalSecret.enabled }}
- name: COMETMQ_INTERNAL_SECRET_FILE
  value: {{ include "cometmq.secretFile" . }}
{{- end }}
{{- end }}

{{/* Options that every service gets: {root, settings}. */}}
{{- define "cometmq.serviceOptions" -}}
listen_host: {{ .root.Values.listenHost | quote }}
port: {{ int .settings.port }}
metrics_port: {{ int .root.Values.metrics.port }}
drain_grace_s: {{ .settings.drainSeconds }}
log_form: {{ .root.Values.logging.form }}
log_level: {{ .root.Values.logging.level }}
{{- end }}

{{/* What a claim asks for: {root, storage}. */}}
{{- define "cometmq.claim" -}}
accessModes:
  - ReadWriteOnce
{{- if eq .storage.type "local" }}
storageClassName: {{ include "cometmq.localClass" .root }}
{{- else if .storage.className }}
storageClassName: {{ .storage.className }}
{{- end }}
resources:
  requests:
    storage: {{ .storage.size }}
{{- end }}

{{/* A container's ports: list of {name, port}, in YAML. Written with their protocol: server-side apply needs it. */}}
{{- define "cometmq.containerPorts" -}}
{{- range . }}
- name: {{ .name }}
  containerPort: {{ int .port }}
  protocol: TCP
{{- end }}
{{- end }}

{{/* A Service's ports: as above. */}}
{{- define "cometmq.servicePorts" -}}
{{- range . }}
- name: {{ .name }}
  port: {{ int .port }}
  targetPort: {{ .name }}
  protocol: TCP
{{- end }}
{{- end }}
