import java.io.File;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.stream.Stream;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.ha.HAServiceProtocol.RequestSource;
import org.apache.hadoop.ha.HAServiceProtocol.StateChangeRequestInfo;
import org.apache.hadoop.hdfs.HdfsConfiguration;
import org.apache.hadoop.hdfs.server.namenode.NameNode;

/**
 * Two real NameNodes, of which one is active, and N real DataNodes; see {@link HdfsServers}. The
 * NameNodes share their edits in a folder, and the arguments say where "0" and "1" of the nameservice
 * "pair" listen.
 *
 * <p>Obeys "fail-over" (the active NameNode becomes standby, and the other active), "kill" (the active
 * one stops, and nobody else does anything), "take-over" (the other one becomes active), "start" (the
 * stopped one comes back as standby).
 */
public class HaHdfs extends HdfsServers {
  private static final StateChangeRequestInfo ASKED =
      new StateChangeRequestInfo(RequestSource.REQUEST_BY_USER);

  private final NameNode[] nameNodes = new NameNode[2];
  private int active;

  HaHdfs(String[] arguments) {
    super(
        arguments,
        "dfs.namenode.shared.edits.dir=file://" + arguments[0] + "/edits",
        "dfs.ha.tail-edits.period=1",
        "dfs.ha.standby.checkpoints=false");
  }

  private Configuration of(int index) {
    Configuration own = new HdfsConfiguration(conf);
    own.set("dfs.nameservice.id", "pair");
    own.set("dfs.ha.namenode.id", "" + index);
    own.set("dfs.namenode.name.dir", "file://" + home + "/namenode" + index);
    return own;
  }

  @Override
  void startNameNodes() throws Exception {
    new File(home, "edits").mkdirs();
    NameNode.format(of(0));
    Path source = new File(home, "namenode0").toPath();
    Path target = new File(home, "namenode1").toPath();
    try (Stream<Path> paths = Files.walk(source)) { // what -bootstrapStandby fetches
      for (Path path : (Iterable<Path>) paths::iterator) {
        Files.copy(path, target.resolve(source.relativize(path)));
      }
    }
    for (int i = 0; i < nameNodes.length; i++) {
      nameNodes[i] = new NameNode(of(i));
    }
    nameNodes[active].getRpcServer().transitionToActive(ASKED);
  }

  @Override
  NameNode[] nameNodes() {
    return nameNodes;
  }

  @Override
  void obey(String[] words) throws Exception {
    int other = 1 - active;
    switch (words[0]) {
      case "fail-over":
        nameNodes[active].getRpcServer().transitionToStandby(ASKED);
        nameNodes[other].getRpcServer().transitionToActive(ASKED);
        active = other;
        break;
      case "kill":
        nameNodes[active].stop();
        nameNodes[active].join();
        break;
      case "take-over":
        nameNodes[other].getRpcServer().transitionToActive(ASKED);
        active = other;
        break;
      case "start":
        nameNodes[other] = new NameNode(of(other));
        waitForDataNodes(nameNodes[other], dataNodes.length);
        break;
      default:
        throw new IllegalArgumentException("unknown command " + words[0]);
    }
  }

  public static void main(String[] arguments) throws Exception {
    new HaHdfs(arguments).run();
  }
}
