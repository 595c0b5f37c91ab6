// The servers of a Kubernetes control plane that keep Leases: `kube etcd …` and `kube apiserver …`.
//
// One program, so that what both are made of is compiled and linked once.
package main

import (
	"fmt"
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() {
	role := ""
	if len(os.Args) > 1 {
		role = os.Args[1]
		os.Args = append(os.Args[:1], os.Args[2:]...)
	}
	switch role {
	case "etcd":
		etcdmain.Main(os.Args)
	case "apiserver":
		os.Exit(cli.Run(app.NewAPIServerCommand()))
	default:
		fmt.Fprintln(os.Stderr, "usage: kube etcd|apiserver FLAGS")
		os.Exit(2)
	}
}
