{{/* Names and labels. Every helper takes a dict; `root` in it is the chart's context. */}}

{{- define "cometmq.prefix" -}}
{{- .Values.fullnameOverride | default .Release.Name -}}
{{- end }}

{{/* Name of a component's objects: {root, component}. A pod's name and its controller's hash must fit into a label. */}}
{{- define "cometmq.name" -}}
{{- $name := printf "%s-%s" (include "cometmq.prefix" .root) .component -}}
{{- if gt (len $name) 52 -}}
{{- fail (printf "the name %s has more than 52 characters: choose a shorter release name, fullnameOverride or group name" $name) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{/* The labels that select a component's pods, never changed: {root, component, group?}. */}}
{{- define "cometmq.selector" -}}
app.kubernetes.io/name: cometmq
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | splitList "-" | first }}
{{- with .group }}
cometmq.io/broker-group: {{ . | quote }}
{{- end }}
{{- end }}

{{/* The labels of a pod: nothing that changes with every version of the chart, or each would restart all pods. */}}
{{- define "cometmq.podLabels" -}}
{{ include "cometmq.selector" . }}
app.kubernetes.io/part-of: cometmq
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The labels of every other object: {root, component, group?}. */}}
{{- define "cometmq.labels" -}}
{{ include "cometmq.podLabels" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* DNS name of a Service: {root, component}. */}}
{{- define "cometmq.host" -}}
{{- printf "%s.%s.svc.%s" (include "cometmq.name" .) .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end }}

{{/* The one address of all name servers. */}}
{{- define "cometmq.namesrvAddress" -}}
{{- printf "%s:%d" (include "cometmq.host" (dict "root" . "component" "namesrv")) (int .Values.namesrv.port) -}}
{{- end }}

{{- define "cometmq.localClass" -}}
{{- .Values.localStorage.className | default (printf "%s-local" (include "cometmq.prefix" .)) -}}
{{- end }}

{{/* Values of one broker group: those of `broker`, with the group's own laid over them. {root, group} → YAML. */}}
{{- define "cometmq.group" -}}
{{- $common := omit .root.Values.broker "groups" -}}
{{- toYaml (mustMergeOverwrite (deepCopy $common) (deepCopy .group)) -}}
{{- end }}

{{/* Whether anything wants volumes of the local class: "true" or nothing. */}}
{{- define "cometmq.usesLocalStorage" -}}
{{- $types := list -}}
{{- range .Values.broker.groups -}}
{{- $group := include "cometmq.group" (dict "root" $ "group" .) | fromYaml -}}
{{- $types = append $types $group.storage.type -}}
{{- end -}}
{{- if .Values.namesrv.storage.persistent -}}{{- $types = append $types .Values.namesrv.storage.type -}}{{- end -}}
{{- if and .Values.lag.enabled (not .Values.lag.storage.existingClaim) -}}{{- $types = append $types .Values.lag.storage.type -}}{{- end -}}
{{- if has "local" $types -}}true{{- end -}}
{{- end }}

{{/* Bytes of a quantity such as 20Gi. */}}
{{- define "cometmq.bytes" -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- $units = merge $units (dict "m" 0.001 "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000) -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- mulf (float64 $number) (float64 (get $units (trimPrefix $number .))) | int64 -}}
{{- end }}

{{/* How many log files the volume of a group holds: its values. Without a word the option is 1 GiB. */}}
{{- define "cometmq.logFiles" -}}
{{- div (include "cometmq.bytes" .storage.size | int64) (.config.mapped_file_size_commit_log | default 1073741824 | int64) -}}
{{- end }}

{{/* "1 member", "2 members": (count, word). */}}
{{- define "cometmq.count" -}}
{{- $count := int (first .) -}}
{{- printf "%d %s%s" $count (last .) (ternary "" "s" (eq $count 1)) -}}
{{- end }}
