#!/bin/bash
# Checks of the chart that need no cluster. Usage: charts/psjobs/tests/check.sh (helm on the PATH)
set -euo pipefail
cd "$(dirname "$0")/.."
failures=0

fail() { echo "FAIL: $1" >&2; failures=$((failures + 1)); }
render() { helm template psjobs . --namespace psjobs-system "$@"; }
# expect LABEL PATTERN [helm arguments]: the rendered release has the pattern.
expect() { if grep -q -- "$2" <<<"$(render "${@:3}")"; then echo "ok: $1"; else fail "$1: no $2"; fi; }
# forbid LABEL PATTERN [helm arguments]: it does not have it.
forbid() {
  local rendered
  rendered=$(render "${@:3}") || { fail "$1: it does not render"; return; }
  if grep -q -- "$2" <<<"$rendered"; then fail "$1: found $2"; else echo "ok: $1"; fi
}
# refuse LABEL PATTERN [helm arguments]: the values are refused, and the message has the pattern.
refuse() {
  local message
  if message=$(render "${@:3}" 2>&1); then fail "$1: accepted"
  elif grep -q -- "$2" <<<"$message"; then echo "ok: $1"
  else fail "$1: the message does not name $2: $message"; fi
}

if helm lint --strict . >/dev/null; then echo "ok: helm lint"; else fail "helm lint"; fi

if cmp -s files/parameterserverjobs.psjobs.dev.yaml ../../crds/parameterserverjobs.psjobs.dev.yaml
then echo "ok: the chart's definition is the one in crds/"
else fail "files/ differs from crds/; run make generate"; fi
expect "uninstalling keeps the definition" 'helm.sh/resource-policy: keep'
expect "the definition comes with the release" 'kind: CustomResourceDefinition'
forbid "crds.install=false leaves it out" 'kind: CustomResourceDefinition' --set crds.install=false

expect "cluster-wide by default" 'kind: ClusterRole$'
forbid "one namespace needs no cluster role" 'kind: ClusterRole' --set watchNamespace=team
expect "cluster-wide it sees nodes" 'resources: \[nodes\]'
forbid "in one namespace it does not ask for nodes" 'resources: \[nodes\]' --set watchNamespace=team
expect "one namespace has its role there" 'namespace: team' --set watchNamespace=team
expect "the operator receives its namespace" 'name: PSJOBS_NAMESPACE' --set watchNamespace=team
forbid "rbac.create=false makes no roles" 'kind: Role' --set rbac.create=false
forbid "no wildcard in any role" "'\*'\|\[\"\*\"\]"

forbid "no ServiceMonitor unless asked" 'kind: ServiceMonitor'
expect "a ServiceMonitor when asked" 'kind: ServiceMonitor' --set metrics.serviceMonitor.enabled=true

forbid "no alerts unless asked" 'kind: PrometheusRule'
expect "alerts when asked" 'alert: PsjobsNoLeader' --set metrics.prometheusRule.enabled=true
forbid "no dashboard unless asked" 'grafana_dashboard'
expect "a dashboard when asked" 'grafana_dashboard: "1"' --set metrics.dashboard.enabled=true
if python3 -m json.tool files/dashboard.json >/dev/null; then echo "ok: the dashboard is JSON"; else fail "files/dashboard.json"; fi
forbid "no PodMonitor unless asked" 'kind: PodMonitor'
expect "a PodMonitor when asked" 'psjobs.dev/role: ps' --set metrics.podMonitor.enabled=true
expect "one of servers in trainers' pods, too" 'psjobs.dev/placement: Colocated' --set metrics.podMonitor.enabled=true
expect "in one namespace if only that is watched" 'matchNames: \[team\]' --set metrics.podMonitor.enabled=true --set watchNamespace=team
forbid "no alerts about jobs that are not watched" 'psjobs_ps_' --set metrics.prometheusRule.enabled=true
alerts="--set metrics.prometheusRule.enabled=true --set metrics.podMonitor.enabled=true"
promtool=$(../../scripts/promtool.sh)
if [ -z "$promtool" ]; then
  echo "queries and alerts: not checked, promtool is not installed"
# shellcheck disable=SC2086 # flags
elif ! render $alerts --show-only templates/prometheusrule.yaml | tests/queries.py "$promtool"; then
  fail "queries and alerts"
fi
# Every metric that a panel or an alert asks for is one that servers have, or the operator.
for metric in $(grep -oh 'psjobs_ps_[a-z_]*' files/training-dashboard.json templates/prometheusrule.yaml | sed 's/_bucket$//; s/^psjobs_ps_//' | sort -u); do
  if grep -q "\"$metric\"\|psjobs_ps_$metric" ../../ps/src/server/service/metrics.rs; then echo "ok: servers have the metric $metric"; else fail "no metric psjobs_ps_$metric"; fi
done
for metric in $(grep -oh 'psjobs_[a-z_]*' files/dashboard.json templates/prometheusrule.yaml | grep -v '^psjobs_ps_' | sed 's/_total$//; s/_bucket$//; s/_count$//; s/^psjobs_//' | sort -u); do
  if grep -q "\"$metric\"" ../../operator/src/metrics.rs; then echo "ok: the metric $metric exists"; else fail "no metric $metric"; fi
done
expect "an operator at a time may be drained" 'maxUnavailable: 1'
forbid "no budget if not wanted" 'kind: PodDisruptionBudget' --set podDisruptionBudget.enabled=false

expect "images follow the appVersion" "image: \"psjobs-operator:$(sed -n 's/^appVersion: //p' Chart.yaml)\""
expect "servers' image follows it too" "value: \"psjobs-worker:$(sed -n 's/^appVersion: //p' Chart.yaml)\""
expect "the image can be set" 'image: "registry.example/op:7"' --set image.repository=registry.example/op --set-string image.tag=7
digest=sha256:$(printf '%064d' 7)
expect "the image can be set by digest" "image: \"psjobs-operator:[0-9.]*@$digest\"" --set image.digest="$digest"
refuse "a wrong digest is refused" 'digest' --set image.digest=sha256:7
expect "without an election no two operators overlap" 'type: Recreate' --set leaderElection.enabled=false
forbid "without an election no lease" 'leases' --set leaderElection.enabled=false
forbid "no shard unless asked" 'PSJOBS_SHARD'
expect "the operator receives its shard" 'name: PSJOBS_SHARD' --set shard=gpu
expect "its lease is the operators' without a shard" 'resourceNames: \["psjobs-operator"\]'
expect "a shard has a lease of its own" 'resourceNames: \["psjobs-operator-gpu"\]' --set shard=gpu
for line in 'runAsNonRoot: true' 'readOnlyRootFilesystem: true' 'drop: \[ALL\]' 'path: /readyz' 'path: /healthz'; do
  expect "the operator's pod has $line" "$line"
done

forbid "no page unless asked" 'psjobs-web'
web="--set web.enabled=true --show-only templates/web.yaml"
# shellcheck disable=SC2086 # flags
page() {
  for line in 'command: \[psjobs-web\]' 'runAsNonRoot: true' 'readOnlyRootFilesystem: true' 'drop: \[ALL\]' 'path: /readyz' \
    'path: /healthz' 'resources: \[tokenreviews\]' 'resources: \[subjectaccessreviews\]' 'component: web'; do
    expect "the page's release has $line" "$line" $web
  done
  expect "records are in a volume that stays" 'claimName: psjobs-web-records' $web
  expect "of the size that is asked for" 'storage: 5Gi' $web --set web.records.size=5Gi
  expect "or in a volume that is there" 'claimName: mine' $web --set web.records.existingClaim=mine
  forbid "which the release does not make" 'kind: PersistentVolumeClaim' $web --set web.records.existingClaim=mine
  expect "or in a bucket" 'value: "s3://b/jobs"' $web --set web.records.url=s3://b/jobs
  forbid "without a volume" 'persistentVolumeClaim\|PersistentVolumeClaim' $web --set web.records.url=s3://b/jobs
  forbid "or nowhere" 'PSJOBS_WEB_RECORDS\|PersistentVolumeClaim' $web --set web.records.size=
  expect "they are kept for a time" 'value: "7d"' $web --set web.records.keep=7d
  expect "in one namespace its role is there" 'namespace: team' $web --set watchNamespace=team
  expect "a release of its name elsewhere has other cluster roles" 'name: team-psjobs-web-reviews' $web --namespace team
  forbid "none of them has a name without the namespace" 'name: psjobs-web-reviews' $web --namespace team
  forbid "the page changes nothing" 'update\|patch\|delete\|deletecollection' $web
  forbid "without roles it has no rights" 'kind: ClusterRole' $web --set rbac.create=false
  refuse "a volume and a bucket are refused" 'not both' $web --set web.records.existingClaim=mine --set web.records.url=s3://b
  refuse "a wrong time is refused" 'keep' $web --set web.records.keep=soon
  refuse "a wrong bucket is refused" 'url' $web --set web.records.url=http://b
  refuse "a misspelt value of the page is refused" 'enbaled' --set web.enbaled=true
}
page

forbid "no traces unless asked" 'OTEL_'
expect "the operator receives the endpoint of traces" 'value: "http://jaeger.tracing:4317"' --set tracing.endpoint=http://jaeger.tracing:4317
expect "and how many of them" 'value: "0.1"' --set tracing.endpoint=http://j:4317 --set tracing.ratio=0.1
refuse "an endpoint without a scheme is refused" 'endpoint' --set tracing.endpoint=jaeger:4317
refuse "more traces than all are refused" 'ratio' --set tracing.ratio=10

refuse "a misspelt value is refused" 'replicaCuont' --set replicaCuont=2
refuse "a wrong pull policy is refused" 'pullPolicy' --set image.pullPolicy=Sometimes
refuse "a wrong log format is refused" 'format' --set log.format=xml
refuse "a wrong type is refused" 'replicaCount' --set replicaCount=two
refuse "a wrong switch is refused" 'dashboard' --set metrics.dashboard.enabled=maybe
refuse "a wrong shard is refused" 'shard' --set shard=gpu_2
refuse "a wrong namespace is refused" 'watchNamespace' --set watchNamespace=Team_1

if [ "$failures" -gt 0 ]; then echo "$failures check(s) failed" >&2; exit 1; fi
