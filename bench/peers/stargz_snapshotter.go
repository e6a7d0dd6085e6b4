// containerd-stargz-grpc as upstream's main does it, without its optional parts: Debian's package
// has the library and not this program.
package main

import (
	"context"
	"fmt"
	"net"
	"os"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/contrib/snapshotservice"
	"github.com/containerd/stargz-snapshotter/service"
	"google.golang.org/grpc"
)

func main() {
	address, root := os.Args[1], os.Args[2]
	snapshotter, err := service.NewStargzSnapshotterService(context.Background(), root, &service.Config{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	server := grpc.NewServer()
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(snapshotter))
	listener, err := net.Listen("unix", address)
	if err == nil {
		err = server.Serve(listener)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
