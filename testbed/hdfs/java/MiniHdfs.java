import java.io.File;
import org.apache.hadoop.hdfs.server.namenode.NameNode;

/**
 * A real NameNode and N real DataNodes; see {@link HdfsServers}.
 *
 * <p>Obeys "kill I" and "start I" (a DataNode), "stop-namenode", "start-namenode", "wait N" (until N
 * DataNodes are live).
 */
public class MiniHdfs extends HdfsServers {
  private NameNode nameNode;

  MiniHdfs(String[] arguments) {
    super(
        arguments,
        "dfs.namenode.name.dir=file://" + arguments[0] + "/namenode",
        // A NameNode that comes back serves when it has heard of every block.
        "dfs.namenode.safemode.threshold-pct=1.0f",
        // With heartbeats of 1 s a dead DataNode is noticed in 2 * 2 s + 10 * 1 s instead of ten
        // minutes.
        "dfs.namenode.heartbeat.recheck-interval=2000");
  }

  @Override
  void startNameNodes() throws Exception {
    if (!new File(home, "namenode/current/VERSION").exists()) {
      new File(home, "namenode").mkdirs();
      NameNode.format(conf);
    }
    nameNode = new NameNode(conf);
  }

  @Override
  NameNode[] nameNodes() {
    return new NameNode[] {nameNode};
  }

  @Override
  void obey(String[] words) throws Exception {
    switch (words[0]) {
      case "kill":
        dataNodes[Integer.parseInt(words[1])].shutdown();
        break;
      case "start":
        startDataNode(Integer.parseInt(words[1]));
        break;
      case "stop-namenode":
        nameNode.stop();
        nameNode.join();
        break;
      case "start-namenode":
        startNameNodes();
        break;
      case "wait":
        waitForDataNodes(nameNode, Integer.parseInt(words[1]));
        break;
      default:
        throw new IllegalArgumentException("unknown command " + words[0]);
    }
  }

  public static void main(String[] arguments) throws Exception {
    new MiniHdfs(arguments).run();
  }
}
