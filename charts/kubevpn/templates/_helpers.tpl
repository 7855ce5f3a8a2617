{{/* Labels of every object. Those of the selector are a subset and never change. */}}
{{- define "kubevpn.labels" -}}
app.kubernetes.io/component: traffic-manager
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/name: kubevpn
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kubevpn.annotations" -}}
{{- with .Values.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Several releases can share a cluster, each in a namespace of its own. */}}
{{- define "kubevpn.clusterName" -}}
kubevpn-traffic-manager-{{ .Release.Namespace }}
{{- end }}

{{- define "kubevpn.image" -}}
{{- $repository := required "set image.repository to the image of the traffic manager" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* The subjects that may connect. */}}
{{- define "kubevpn.users" -}}
{{- range .Values.access.users }}
- apiGroup: rbac.authorization.k8s.io
  kind: User
  name: {{ . | quote }}
{{- end }}
{{- range .Values.access.groups }}
- apiGroup: rbac.authorization.k8s.io
  kind: Group
  name: {{ . | quote }}
{{- end }}
{{- end }}
